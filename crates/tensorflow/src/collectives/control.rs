//! What Python calls: one function that takes a question and gives an answer, both JSON.
//!
//! A call may wait (for the other ranks to connect, for a barrier). ctypes holds no lock of Python
//! meanwhile.

use super::{WORLD, World, world};
use evener_collectives::engine::{Engine, Failure, Options};
use evener_collectives::light::{Guard, Light, TopK};
use evener_negotiate::coordinator::Moment;
use evener_negotiate::{Kind, Policy, Request};
use serde::Deserialize;
use serde_json::{Value, json};
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

/// This process's place, as ops give it.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Seat {
    pub rank: i32,
    pub local_rank: i32,
    pub local_size: i32,
}

#[derive(Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
enum Ask {
    /// A new engine, which listens. Gives its ports.
    Open(Open),
    /// All ranks have opened theirs.
    Connect {
        places: Vec<(Vec<String>, u16)>,
        control: u16,
        token: String,
        seat: Seat,
        light: Option<Ease>,
    },
    OpenGate {
        path: String,
    },
    UseGate,
    /// An operation without data.
    Run {
        kind: u8,
        name: String,
        set: u32,
        root: u32,
        splits: Vec<u64>,
    },
    Sets,
    Ended,
    Frozen,
    /// How many sums went in two levels, and how many gradients in part.
    Lightened,
    /// The gradient of this mark is for an optimizer that is linear in it.
    Linear {
        mark: u32,
    },
    Joins,
    Now,
    Record {
        on: bool,
    },
    News,
    /// Ends all operations with this reason, at once.
    Abort {
        reason: String,
    },
    /// Ends the engine of this process, or waits on with the ends of earlier ones.
    Close {
        linger: f64,
    },
    /// Whether an earlier engine serves others still.
    Serve {
        linger: f64,
    },
}

#[derive(Deserialize)]
struct Open {
    rank: u32,
    size: u32,
    sets: Vec<Vec<u32>>,
    fusion: u64,
    cache: usize,
    repeats: usize,
    frozen_bytes: u64,
    stall_warn: f64,
    stall_abort: f64,
    cycle: f64,
    timeout: f64,
}

/// See [`Light`]. Absent where all goes as it is.
#[derive(Deserialize)]
struct Ease {
    inner: Vec<usize>,
    outer: Vec<usize>,
    sizes: Vec<usize>,
    two_level_max: usize,
    topk: Option<Part>,
}

#[derive(Deserialize)]
struct Part {
    ratio: f64,
    least: usize,
    halves: bool,
    warmup: u64,
    guard_steps: u64,
    guard_linear: f64,
    guard_strict: f64,
}

impl From<Ease> for Light {
    fn from(ease: Ease) -> Self {
        Self {
            inner: ease.inner,
            outer: ease.outer,
            sizes: ease.sizes,
            two_level_max: ease.two_level_max,
            topk: ease.topk.map(|part| TopK {
                ratio: part.ratio,
                least: part.least,
                halves: part.halves,
                warmup: part.warmup,
                guard: Guard {
                    every: part.guard_steps,
                    linear: part.guard_linear,
                    strict: part.guard_strict,
                },
            }),
        }
    }
}

/// Opened and not connected yet; and closed, but with others that need the negotiation of rank 0.
static OPENED: Mutex<Option<Arc<Engine>>> = Mutex::new(None);
static SERVING: Mutex<Vec<Arc<Engine>>> = Mutex::new(Vec::new());

/// Answers a question. What it gives is freed by [`evener_horovod_free`].
///
/// # Safety
/// `question` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evener_horovod_call(question: *const c_char) -> *mut c_char {
    // SAFETY: promised by the caller.
    let text = unsafe { CStr::from_ptr(question) }.to_string_lossy();
    let answer = serde_json::from_str::<Ask>(&text)
        .map_err(|error| problem("call", error))
        .and_then(|ask| {
            catch_unwind(AssertUnwindSafe(|| answer(ask)))
                .unwrap_or_else(|_| Err(problem("call", "a bug in Evener: a panic")))
        })
        .unwrap_or_else(|error| error);
    CString::new(answer.to_string())
        .unwrap_or_default()
        .into_raw()
}

/// Frees an answer.
///
/// # Safety
/// It came from [`evener_horovod_call`], and is freed once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evener_horovod_free(answer: *mut c_char) {
    if !answer.is_null() {
        // SAFETY: promised by the caller.
        drop(unsafe { CString::from_raw(answer) });
    }
}

/// An error as JSON: what sort it is, and its text.
fn problem(sort: &str, text: impl ToString) -> Value {
    json!({"error": sort, "text": text.to_string()})
}

fn current() -> Result<World, Value> {
    world().ok_or_else(|| problem("uninitialized", "Horovod has not been initialized"))
}

fn answer(ask: Ask) -> Result<Value, Value> {
    match ask {
        Ask::Open(open) => {
            let micros = |seconds: f64| (seconds.clamp(0.0, 1e9) * 1e6) as u64;
            let policy = Policy {
                fusion: open.fusion,
                cache: open.cache,
                repeats: open.repeats,
                frozen_bytes: open.frozen_bytes,
                stall_warn: micros(open.stall_warn),
                stall_abort: micros(open.stall_abort),
                record: false,
            };
            let engine = Engine::new(Options {
                rank: open.rank,
                size: open.size,
                sets: open.sets,
                policy,
                cycle: open.cycle,
                timeout: open.timeout,
            })
            .map_err(|error| problem("broken", error))?;
            let (control, data) = engine.ports();
            *OPENED.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(engine));
            Ok(json!({"control": control, "data": data}))
        }
        Ask::Connect {
            places,
            control,
            token,
            seat,
            light,
        } => {
            let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner).take();
            let engine = opened.ok_or_else(|| problem("call", "open comes first"))?;
            if let Some(light) = light {
                engine.lighten(light.into());
            }
            engine
                .connect(&places, control, &token)
                .map_err(|error| problem("broken", error))?;
            *WORLD.write().unwrap_or_else(PoisonError::into_inner) = Some(World {
                engine,
                place: seat,
            });
            Ok(json!({}))
        }
        Ask::OpenGate { path } => {
            let file = std::fs::File::options().read(true).write(true).open(path);
            let file = file.map_err(|error| problem("broken", error))?;
            let opened = current()?.engine.node().open_gate(&file);
            opened.map_err(|error| problem("broken", error))?;
            Ok(json!({}))
        }
        Ask::UseGate => {
            current()?.engine.use_gate();
            Ok(json!({}))
        }
        Ask::Run {
            kind,
            name,
            set,
            root,
            splits,
        } => {
            let kind = Kind::from_number(kind)
                .ok_or_else(|| problem("call", format!("kind {kind} is unknown")))?;
            let request = Request {
                name,
                set,
                kind,
                tensors: Vec::new(),
                gpu: false,
                op: 0,
                root,
                factors: (1.0, 1.0),
                splits,
            };
            let engine = current()?.engine;
            let outcome = engine.wait(request).map_err(|failure| match failure {
                Failure::Refused(text) => problem("refused", text),
                Failure::Mismatch(text) => problem("mismatch", text),
                Failure::Broken(text) => problem("broken", text),
            })?;
            Ok(json!({"value": outcome.value}))
        }
        Ask::Sets => Ok(json!({"sets": current()?.engine.sets()})),
        Ask::Ended => Ok(json!({"ended": current()?.engine.node().ended()})),
        Ask::Frozen => Ok(json!({"frozen": current()?.engine.node().frozen()})),
        Ask::Lightened => Ok(json!({"lightened": current()?.engine.lightened()})),
        Ask::Linear { mark } => {
            current()?.engine.is_linear(mark);
            Ok(json!({}))
        }
        Ask::Joins => Ok(json!({"joins": current()?.engine.joins()})),
        Ask::Now => Ok(json!({"now": current()?.engine.node().now() as f64 / 1e6})),
        Ask::Record { on } => {
            current()?.engine.node().record(on);
            Ok(json!({}))
        }
        Ask::News => {
            let engine = current()?.engine;
            let (events, warnings) = engine.node().news();
            let falls = engine.falls();
            let falls: Vec<Value> = falls
                .into_iter()
                .map(|fall| json!([fall.mark, fall.step, fall.ratio, fall.limit]))
                .collect();
            let events: Vec<Value> = events
                .into_iter()
                .map(|event| {
                    let (moment, rank) = match event.moment {
                        Moment::Start => (0, 0),
                        Moment::Ready(rank) => (1, rank),
                        Moment::End => (2, 0),
                        Moment::Cycle => (3, 0),
                    };
                    let at = event.at as f64 / 1e6;
                    json!([at, event.name, event.kind as u8, moment, rank])
                })
                .collect();
            Ok(json!({"events": events, "warnings": warnings, "falls": falls}))
        }
        Ask::Abort { reason } => {
            if let Some(world) = world() {
                world.engine.abort(&reason);
            }
            Ok(json!({}))
        }
        Ask::Close { linger } => {
            OPENED.lock().unwrap_or_else(PoisonError::into_inner).take();
            let old = WORLD.write().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(World { engine, .. }) = old
                && !engine.close(linger)
            {
                SERVING
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(engine);
            }
            Ok(json!({}))
        }
        Ask::Serve { linger } => {
            let mut serving = SERVING.lock().unwrap_or_else(PoisonError::into_inner);
            serving.retain(|engine| !engine.close(linger));
            Ok(json!({"serving": !serving.is_empty()}))
        }
    }
}
