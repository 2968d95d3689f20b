//! The ops of embeddings. Each names its store; keys are int64, values float32 whatever the store keeps.
//! [`ops!`] makes the table below into types that TensorFlow can be told of; what each does is a function
//! of the store and the run.

use crate::aside;
use crate::capi::{Code, c};
use crate::kernel::{Input, Node, Op, Result, Run, Shapes, register};
use crate::stores::Named;
use std::ffi::CStr;

/// `Name [inputs] -> [outputs], shapes, function;`. All are named `EvenerEmbedding...` and have the
/// attributes that say which store, and how to make it where it is not there yet; `(flag = default)`
/// is one more, a bool that the function gets as its last argument.
macro_rules! ops {
    ($($(#[$doc:meta])* $op:ident [$($input:literal),*] -> [$($output:literal),*], $shapes:ident,
        $work:ident $(($flag:ident = $default:literal))?;)*) => {
        $($(#[$doc])*
        struct $op {
            store: Named,
            $($flag: bool,)?
        }

        impl Op for $op {
            const NAME: &'static CStr = c(concat!("EvenerEmbedding", stringify!($op), "\0"));
            const ATTRIBUTES: &'static [&'static CStr] = &[
                c"store: string",
                c"options: string = ''",
                $(c(concat!(stringify!($flag), ": bool = ", stringify!($default), "\0")),)?
            ];
            const INPUTS: &'static [&'static CStr] = &[$($input),*];
            const OUTPUTS: &'static [&'static CStr] = &[$($output),*];
            const SHAPES: Shapes = Shapes::$shapes;

            fn new(node: &Node) -> Result<Self> {
                Ok(Self {
                    store: Named::of(node)?,
                    $($flag: node.flag(c(concat!(stringify!($flag), "\0")))?,)?
                })
            }

            fn run(&self, run: &Run) -> Result<()> {
                $work(&self.store, run $(, self.$flag)?)
            }
        })*

        /// Tells TensorFlow of all of them.
        ///
        /// # Errors
        /// TensorFlow's own words.
        pub fn register_all() -> std::result::Result<(), String> {
            $(register::<$op>()?;)*
            Ok(())
        }
    };
}

ops! {
    /// The rows of `keys`: shape of keys, then dim. `anchor` is a float of shape [dim] that carries the
    /// dim into shape inference and the gradient out (see `evener.embedding.tensorflow`); its values are
    /// not read.
    Lookup [c"keys: int64", c"anchor: float"] -> [c"rows: float"], Joined, lookup(insert = true);

    /// `inside`, which is `anchor`, for lookups inside of branches and loops; and the token of this run,
    /// under which their gradients are put aside.
    Enter [c"anchor: float"] -> [c"inside: float", c"token: int64"], Unknown, enter;

    /// `Lookup` inside of branches and loops. `inside` and `token` are what `Enter` gave around them.
    LookupInside [c"keys: int64", c"inside: float", c"token: int64"] -> [c"rows: float"], Joined,
        lookup(insert = true);

    /// Puts the gradients [n, dim] of keys [n] aside until `Collect`. `put` is zero but for a 1 in the
    /// first place: what leaves branches and loops is added up, so it says there how many came.
    PutAside [c"inside: float", c"token: int64", c"keys: int64", c"gradients: float"]
        -> [c"put: float"], Same, put_aside;

    /// All gradients that were put aside: keys [n], gradients [n, dim]. `put` [dim] is the sum of what
    /// `PutAside` gave.
    Collect [c"put: float", c"token: int64"] -> [c"keys: int64", c"gradients: float"], Unknown, collect;

    /// One step of the store's optimizer: `gradients` [n, dim] of `keys` [n], duplicates summed first.
    /// `step` is the caller's count, or -1 for one more than the last; a learning rate below 0 stands
    /// for the one of the store's options.
    Apply [c"keys: int64", c"gradients: float", c"learning_rate: float", c"step: int64"] -> [], Scalars, apply;

    /// Sets `rows` [n, dim] of `keys` [n]; the last of equal keys counts.
    Upsert [c"keys: int64", c"rows: float"] -> [], Scalars, upsert;

    /// Removes `keys`; gives how many had a row.
    Remove [c"keys: int64"] -> [c"removed: int64"], Scalars, remove;

    /// Removes all rows.
    Clear [] -> [], Scalars, clear;

    /// How many rows there are.
    Size [] -> [c"size: int64"], Scalars, size;

    /// All rows: keys [n], rows [n, dim], and how often and when each was updated, [n] each.
    Export [] -> [c"keys: int64", c"rows: float", c"frequencies: int64", c"versions: int64"], Unknown, export;

    /// int64 keys for strings, of the same shape; equal strings get equal keys and no others do.
    /// Without `insert` a string that the store does not know gets a key that has no row.
    Intern [c"strings: string"] -> [c"keys: int64"], Same, intern(insert = true);

    /// Evicts by the store's policy, as of `step` (-1: the last); gives how many rows went.
    Evict [c"step: int64"] -> [c"evicted: int64"], Scalars, evict;

    /// The whole content at one instant, as bytes: rows, slots, frequencies, versions, strings; and the
    /// store's options, JSON as bytes.
    Save [] -> [c"snapshot: uint8", c"made_with: uint8"], Unknown, save;

    /// Replaces the content by what `Save` gave, or changes nothing. `freeze`: the store serves from now
    /// on; its lookups add nothing and updates are refused.
    Restore [c"snapshot: uint8", c"made_with: uint8"] -> [], Scalars, restore(freeze = false);
}

fn lookup(named: &Named, run: &Run, insert: bool) -> Result<()> {
    let store = named.get()?;
    let (keys, anchor) = (run.input(0)?, run.input(1)?);
    let mut shape = keys.shape();
    let dim = store.dim();
    if anchor.shape() != [dim as i64] {
        return named.refuse(format_args!(
            "its rows have {dim} values, and the graph expects {:?}",
            anchor.shape()
        ));
    }
    shape.push(dim as i64);
    let keys = keys.values()?;
    run.output(0, &shape, |rows| {
        let outcome = if insert {
            store.lookup(keys, named.step(), rows)
        } else {
            store.lookup_infer(keys, rows, None)
        };
        named.named(outcome)
    })
}

fn enter(_named: &Named, run: &Run) -> Result<()> {
    let anchor = run.input(0)?;
    let values = anchor.values::<f32>()?;
    run.output(0, &anchor.shape(), |inside: &mut [f32]| {
        inside.copy_from_slice(values);
        Ok(())
    })?;
    run.scalar(1, aside::token())
}

fn put_aside(named: &Named, run: &Run) -> Result<()> {
    let (inside, keys, gradients) = (run.input(0)?, run.input(2)?, run.input(3)?);
    let (shape, keys) = (inside.shape(), keys.values()?);
    let dim = shape.first().map_or(0, |&dim| dim as usize);
    let gradients = rows(named, dim, keys, &gradients, "gradients")?;
    aside::put(run.input(1)?.scalar("token")?, keys, gradients);
    run.output(0, &shape, |put: &mut [f32]| {
        put.fill(0.0);
        if let Some(count) = put.first_mut() {
            *count = 1.0;
        }
        Ok(())
    })
}

fn collect(named: &Named, run: &Run) -> Result<()> {
    let put = run.input(0)?;
    let (shape, counts) = (put.shape(), put.values::<f32>()?);
    let count = counts.first().copied().unwrap_or(0.0);
    let found = aside::take(run.input(1)?.scalar("token")?);
    if found.count as f32 != count {
        return Err((
            Code::FailedPrecondition,
            format!(
                "embedding '{}': {} gradients of lookups in a branch or a loop were put aside, and \
                 {count} are asked for\n  fix: take the gradient with one tape, once for each run \
                 of the forward pass",
                named.name(),
                found.count
            ),
        ));
    }
    run.vector(0, &found.keys)?;
    run.output(
        1,
        &[found.keys.len() as i64, shape[0]],
        |out: &mut [f32]| {
            out.copy_from_slice(&found.gradients);
            Ok(())
        },
    )
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

fn apply(named: &Named, run: &Run) -> Result<()> {
    let store = named.get()?;
    let (keys, gradients) = (run.input(0)?, run.input(1)?);
    let keys = keys.values()?;
    let gradients = rows(named, store.dim(), keys, &gradients, "gradients")?;
    let rate = run.input(2)?.scalar::<f32>("learning_rate")?;
    let step = named.tick(run.input(3)?.scalar("step")?)?;
    let rate = if rate < 0.0 { None } else { Some(rate) };
    named.named(store.apply(keys, gradients, step, rate))?;
    named.tock(step);
    Ok(())
}

fn upsert(named: &Named, run: &Run) -> Result<()> {
    let store = named.get()?;
    let (keys, given) = (run.input(0)?, run.input(1)?);
    let keys = keys.values()?;
    let values = rows(named, store.dim(), keys, &given, "rows")?;
    named.named(store.upsert(keys, values, named.step()))
}

fn remove(named: &Named, run: &Run) -> Result<()> {
    let keys = run.input(0)?;
    let removed = named.get()?.remove(keys.values()?);
    run.scalar(0, removed as i64)
}

fn clear(named: &Named, _run: &Run) -> Result<()> {
    named.named(named.get()?.clear())
}

fn size(named: &Named, run: &Run) -> Result<()> {
    run.scalar(0, named.get()?.len() as i64)
}

fn export(named: &Named, run: &Run) -> Result<()> {
    let store = named.get()?;
    let (mut keys, mut rows) = (Vec::<i64>::new(), Vec::<f32>::new());
    let (mut frequencies, mut versions) = (Vec::<i64>::new(), Vec::<i64>::new());
    let outcome = store.export(|key, values: &[f32], frequency: u32, version: u32| {
        keys.push(key);
        rows.extend_from_slice(values);
        frequencies.push(i64::from(frequency));
        versions.push(i64::from(version));
    });
    named.named(outcome)?;
    run.vector(0, &keys)?;
    let shape = [keys.len() as i64, store.dim() as i64];
    run.output(1, &shape, |out: &mut [f32]| {
        out.copy_from_slice(&rows);
        Ok(())
    })?;
    run.vector(2, &frequencies)?;
    run.vector(3, &versions)
}

fn intern(named: &Named, run: &Run, insert: bool) -> Result<()> {
    let store = named.get()?;
    let input = run.input(0)?;
    let (mut bytes, mut offsets) = (Vec::new(), vec![0]);
    for string in input.strings()? {
        bytes.extend_from_slice(string);
        offsets.push(bytes.len() as u64);
    }
    run.output(0, &input.shape(), |keys| {
        named.named(store.intern(&bytes, &offsets, insert, keys))
    })
}

fn evict(named: &Named, run: &Run) -> Result<()> {
    let step = match run.input(0)?.scalar::<i64>("step")? {
        // The clock is one ahead of the last update.
        given if given < 0 => named.step().saturating_sub(1),
        given => named.tick(given)?,
    };
    let gone = named.named(named.get()?.evict(step))?;
    run.scalar(0, gone as i64)
}

fn save(named: &Named, run: &Run) -> Result<()> {
    let store = named.get()?;
    run.vector(0, &named.named(store.save_bytes())?)?;
    run.vector(1, named.named(store.options())?.as_bytes())
}

fn restore(named: &Named, run: &Run, freeze: bool) -> Result<()> {
    let store = named.get()?;
    let (snapshot, made_with) = (run.input(0)?, run.input(1)?);
    let (snapshot, made_with) = (snapshot.values::<u8>()?, made_with.values::<u8>()?);
    if freeze && named.trained() {
        // A store is found by its name: what is loaded to serve would take the place of what
        // this process trains.
        return Err((
            Code::FailedPrecondition,
            format!(
                "embedding '{0}' is trained in this process, and the SavedModel that is loaded \
                 has rows for that name\n  fix: load it in another process, or close() the \
                 variable '{0}' first",
                named.name()
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
            return named.named(Err(failed));
        }
        named.named(store.restore_bytes(snapshot))?;
    }
    named.at(&named.named(store.stats())?);
    store.freeze(freeze);
    Ok(())
}
