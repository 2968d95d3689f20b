//! The ops. Each names its store; keys are int64, values float32 whatever the store keeps.

use crate::capi::Code;
use crate::kernel::{Input, Node, Op, Result, Run, Shapes};
use crate::stores::Named;
use std::ffi::CStr;

/// The rows of `keys`: shape of keys, then dim. `anchor` is a float of shape [dim] that carries the
/// dim into shape inference and the gradient out (see `evener.embedding.tensorflow`); its values are
/// not read.
pub struct Lookup {
    store: Named,
    insert: bool,
}

impl Op for Lookup {
    const NAME: &'static CStr = c"EvenerEmbeddingLookup";
    const ATTRIBUTES: &'static [&'static CStr] = &[c"insert: bool = true"];
    const INPUTS: &'static [&'static CStr] = &[c"keys: int64", c"anchor: float"];
    const OUTPUTS: &'static [&'static CStr] = &[c"rows: float"];
    const SHAPES: Shapes = Shapes::Joined;

    fn new(node: &Node) -> Result<Self> {
        Ok(Self {
            store: Named::of(node)?,
            insert: node.flag(c"insert")?,
        })
    }

    fn run(&self, run: &Run) -> Result<()> {
        let store = self.store.get()?;
        let (keys, anchor) = (run.input(0)?, run.input(1)?);
        let mut shape = keys.shape();
        let dim = store.dim();
        if anchor.shape() != [dim as i64] {
            return self.store.refuse(format_args!(
                "its rows have {dim} values, and the graph expects {:?}",
                anchor.shape()
            ));
        }
        shape.push(dim as i64);
        let keys = keys.values()?;
        run.output(0, &shape, |rows| {
            let outcome = if self.insert {
                store.lookup(keys, self.store.step(), rows)
            } else {
                store.lookup_infer(keys, rows, None)
            };
            self.store.named(outcome)
        })
    }
}

/// Values of `rows` and `keys` that belong together, or a refusal.
fn rows<'a>(
    store: &Named,
    dim: usize,
    keys: &[i64],
    rows: &'a Input,
    what: &str,
) -> Result<&'a [f32]> {
    let values = rows.values::<f32>()?;
    if values.len() != keys.len() * dim || rows.shape().last() != Some(&(dim as i64)) {
        return store.refuse(format_args!(
            "{what} must be of shape [{}, {dim}] for {} keys, not {:?}",
            keys.len(),
            keys.len(),
            rows.shape()
        ));
    }
    Ok(values)
}

/// One step of the store's optimizer: `gradients` [n, dim] of `keys` [n], duplicates summed first.
/// `step` is the caller's count, or -1 for one more than the last; a learning rate below 0 stands
/// for the one of the store's options.
pub struct Apply(Named);

impl Op for Apply {
    const NAME: &'static CStr = c"EvenerEmbeddingApply";
    const INPUTS: &'static [&'static CStr] = &[
        c"keys: int64",
        c"gradients: float",
        c"learning_rate: float",
        c"step: int64",
    ];
    const OUTPUTS: &'static [&'static CStr] = &[];
    const SHAPES: Shapes = Shapes::Scalars;

    fn new(node: &Node) -> Result<Self> {
        Named::of(node).map(Self)
    }

    fn run(&self, run: &Run) -> Result<()> {
        let store = self.0.get()?;
        let (keys, gradients) = (run.input(0)?, run.input(1)?);
        let keys = keys.values()?;
        let gradients = rows(&self.0, store.dim(), keys, &gradients, "gradients")?;
        let rate = run.input(2)?.scalar::<f32>("learning_rate")?;
        let step = self.0.tick(run.input(3)?.scalar("step")?)?;
        let rate = if rate < 0.0 { None } else { Some(rate) };
        self.0.named(store.apply(keys, gradients, step, rate))?;
        self.0.tock(step);
        Ok(())
    }
}

/// Sets `rows` [n, dim] of `keys` [n]; the last of equal keys counts.
pub struct Upsert(Named);

impl Op for Upsert {
    const NAME: &'static CStr = c"EvenerEmbeddingUpsert";
    const INPUTS: &'static [&'static CStr] = &[c"keys: int64", c"rows: float"];
    const OUTPUTS: &'static [&'static CStr] = &[];
    const SHAPES: Shapes = Shapes::Scalars;

    fn new(node: &Node) -> Result<Self> {
        Named::of(node).map(Self)
    }

    fn run(&self, run: &Run) -> Result<()> {
        let store = self.0.get()?;
        let (keys, given) = (run.input(0)?, run.input(1)?);
        let keys = keys.values()?;
        let values = rows(&self.0, store.dim(), keys, &given, "rows")?;
        self.0.named(store.upsert(keys, values, self.0.step()))
    }
}

/// Removes `keys`; gives how many had a row.
pub struct Remove(Named);

impl Op for Remove {
    const NAME: &'static CStr = c"EvenerEmbeddingRemove";
    const INPUTS: &'static [&'static CStr] = &[c"keys: int64"];
    const OUTPUTS: &'static [&'static CStr] = &[c"removed: int64"];
    const SHAPES: Shapes = Shapes::Scalars;

    fn new(node: &Node) -> Result<Self> {
        Named::of(node).map(Self)
    }

    fn run(&self, run: &Run) -> Result<()> {
        let keys = run.input(0)?;
        let removed = self.0.get()?.remove(keys.values()?);
        run.scalar(0, removed as i64)
    }
}

/// Removes all rows.
pub struct Clear(Named);

impl Op for Clear {
    const NAME: &'static CStr = c"EvenerEmbeddingClear";
    const INPUTS: &'static [&'static CStr] = &[];
    const OUTPUTS: &'static [&'static CStr] = &[];
    const SHAPES: Shapes = Shapes::Scalars;

    fn new(node: &Node) -> Result<Self> {
        Named::of(node).map(Self)
    }

    fn run(&self, _run: &Run) -> Result<()> {
        self.0.named(self.0.get()?.clear())
    }
}

/// How many rows there are.
pub struct Size(Named);

impl Op for Size {
    const NAME: &'static CStr = c"EvenerEmbeddingSize";
    const INPUTS: &'static [&'static CStr] = &[];
    const OUTPUTS: &'static [&'static CStr] = &[c"size: int64"];
    const SHAPES: Shapes = Shapes::Scalars;

    fn new(node: &Node) -> Result<Self> {
        Named::of(node).map(Self)
    }

    fn run(&self, run: &Run) -> Result<()> {
        run.scalar(0, self.0.get()?.len() as i64)
    }
}

/// All rows: keys [n], rows [n, dim], and how often and when each was updated, [n] each.
pub struct Export(Named);

impl Op for Export {
    const NAME: &'static CStr = c"EvenerEmbeddingExport";
    const INPUTS: &'static [&'static CStr] = &[];
    const OUTPUTS: &'static [&'static CStr] = &[
        c"keys: int64",
        c"rows: float",
        c"frequencies: int64",
        c"versions: int64",
    ];
    const SHAPES: Shapes = Shapes::Unknown;

    fn new(node: &Node) -> Result<Self> {
        Named::of(node).map(Self)
    }

    fn run(&self, run: &Run) -> Result<()> {
        let store = self.0.get()?;
        let (mut keys, mut rows) = (Vec::<i64>::new(), Vec::<f32>::new());
        let (mut frequencies, mut versions) = (Vec::<i64>::new(), Vec::<i64>::new());
        let outcome = store.export(|key, values: &[f32], frequency: u32, version: u32| {
            keys.push(key);
            rows.extend_from_slice(values);
            frequencies.push(i64::from(frequency));
            versions.push(i64::from(version));
        });
        self.0.named(outcome)?;
        run.vector(0, &keys)?;
        let shape = [keys.len() as i64, store.dim() as i64];
        run.output(1, &shape, |out: &mut [f32]| {
            out.copy_from_slice(&rows);
            Ok(())
        })?;
        run.vector(2, &frequencies)?;
        run.vector(3, &versions)
    }
}

/// int64 keys for strings, of the same shape; equal strings get equal keys and no others do.
/// Without `insert` a string that the store does not know gets a key that has no row.
pub struct Intern {
    store: Named,
    insert: bool,
}

impl Op for Intern {
    const NAME: &'static CStr = c"EvenerEmbeddingIntern";
    const ATTRIBUTES: &'static [&'static CStr] = &[c"insert: bool = true"];
    const INPUTS: &'static [&'static CStr] = &[c"strings: string"];
    const OUTPUTS: &'static [&'static CStr] = &[c"keys: int64"];
    const SHAPES: Shapes = Shapes::Same;

    fn new(node: &Node) -> Result<Self> {
        Ok(Self {
            store: Named::of(node)?,
            insert: node.flag(c"insert")?,
        })
    }

    fn run(&self, run: &Run) -> Result<()> {
        let store = self.store.get()?;
        let input = run.input(0)?;
        let (mut bytes, mut offsets) = (Vec::new(), vec![0]);
        for string in input.strings()? {
            bytes.extend_from_slice(string);
            offsets.push(bytes.len() as u64);
        }
        run.output(0, &input.shape(), |keys| {
            self.store
                .named(store.intern(&bytes, &offsets, self.insert, keys))
        })
    }
}

/// Evicts by the store's policy, as of `step` (-1: the last); gives how many rows went.
pub struct Evict(Named);

impl Op for Evict {
    const NAME: &'static CStr = c"EvenerEmbeddingEvict";
    const INPUTS: &'static [&'static CStr] = &[c"step: int64"];
    const OUTPUTS: &'static [&'static CStr] = &[c"evicted: int64"];
    const SHAPES: Shapes = Shapes::Scalars;

    fn new(node: &Node) -> Result<Self> {
        Named::of(node).map(Self)
    }

    fn run(&self, run: &Run) -> Result<()> {
        let step = match run.input(0)?.scalar::<i64>("step")? {
            // The clock is one ahead of the last update.
            given if given < 0 => self.0.step().saturating_sub(1),
            given => self.0.tick(given)?,
        };
        let gone = self.0.named(self.0.get()?.evict(step))?;
        run.scalar(0, gone as i64)
    }
}

/// The whole content at one instant, as bytes: rows, slots, frequencies, versions, strings; and the
/// store's options, JSON as bytes.
pub struct Save(Named);

impl Op for Save {
    const NAME: &'static CStr = c"EvenerEmbeddingSave";
    const INPUTS: &'static [&'static CStr] = &[];
    const OUTPUTS: &'static [&'static CStr] = &[c"snapshot: uint8", c"made_with: uint8"];
    const SHAPES: Shapes = Shapes::Unknown;

    fn new(node: &Node) -> Result<Self> {
        Named::of(node).map(Self)
    }

    fn run(&self, run: &Run) -> Result<()> {
        let store = self.0.get()?;
        run.vector(0, &self.0.named(store.save_bytes())?)?;
        run.vector(1, self.0.named(store.options())?.as_bytes())
    }
}

/// Replaces the content by what `Save` gave, or changes nothing. `freeze`: the store serves from now
/// on; its lookups add nothing and updates are refused.
pub struct Restore {
    store: Named,
    freeze: bool,
}

impl Op for Restore {
    const NAME: &'static CStr = c"EvenerEmbeddingRestore";
    const ATTRIBUTES: &'static [&'static CStr] = &[c"freeze: bool = false"];
    const INPUTS: &'static [&'static CStr] = &[c"snapshot: uint8", c"made_with: uint8"];
    const OUTPUTS: &'static [&'static CStr] = &[];
    const SHAPES: Shapes = Shapes::Scalars;

    fn new(node: &Node) -> Result<Self> {
        Ok(Self {
            store: Named::of(node)?,
            freeze: node.flag(c"freeze")?,
        })
    }

    fn run(&self, run: &Run) -> Result<()> {
        let store = self.store.get()?;
        let (snapshot, made_with) = (run.input(0)?, run.input(1)?);
        let (snapshot, made_with) = (snapshot.values::<u8>()?, made_with.values::<u8>()?);
        if self.freeze && self.store.trained() {
            // A store is found by its name: what is loaded to serve would take the place of what
            // this process trains.
            return Err((
                Code::FailedPrecondition,
                format!(
                    "embedding '{0}' is trained in this process, and the SavedModel that is loaded \
                     has rows for that name\n  fix: load it in another process, or close() the \
                     variable '{0}' first",
                    self.store.name()
                ),
            ));
        }
        store.freeze(false);
        if let Err(failed) = store.restore_bytes(snapshot) {
            // A table whose optimizer is not said yet takes that of the snapshot.
            let optimizer = String::from_utf8_lossy(made_with);
            let adopted = serde_json::from_str::<serde_json::Value>(&optimizer)
                .ok()
                .and_then(|options| options.get("optimizer").map(ToString::to_string))
                .is_some_and(|optimizer| store.set_optimizer(&optimizer).is_ok());
            if !adopted {
                return self.store.named(Err(failed));
            }
            self.store.named(store.restore_bytes(snapshot))?;
        }
        self.store.at(&self.store.named(store.stats())?);
        store.freeze(self.freeze);
        Ok(())
    }
}
