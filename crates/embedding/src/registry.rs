//! The stores of this process by name: what makes one table serve several doors.
//!
//! The names are those of one copy of this code. Two shared objects that both contain this crate have
//! two registries; [`crate::abi`] says how the second one uses the first one's.

use crate::error::{Error, Result, invalid};
use crate::options::Options;
use crate::store::Store;
use crate::table::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

static STORES: Mutex<BTreeMap<String, Arc<Store>>> = Mutex::new(BTreeMap::new());

/// The store of this name, made if there is none.
///
/// # Errors
/// [`Error::Invalid`] where there is one with other options: it names the first that differs. `threads`
/// and `reserve` may differ.
pub fn open(name: &str, options: Options) -> Result<Arc<Store>> {
    options.check()?;
    let mut stores = lock(&STORES);
    if let Some(store) = stores.get(name) {
        differs(name, &store.options(), &options)?;
        return Ok(store.clone());
    }
    let store = Arc::new(Store::new(options)?);
    stores.insert(name.to_owned(), store.clone());
    Ok(store)
}

fn differs(name: &str, has: &Options, wants: &Options) -> Result<()> {
    let wanted = Options {
        threads: has.threads,
        reserve: has.reserve,
        ..wants.clone()
    };
    let (Ok(serde_json::Value::Object(has)), Ok(serde_json::Value::Object(wanted))) =
        (serde_json::to_value(has), serde_json::to_value(&wanted))
    else {
        return Ok(());
    };
    match wanted
        .iter()
        .find(|(field, value)| has.get(*field) != Some(value))
    {
        None => Ok(()),
        Some((field, value)) => invalid(format!(
            "embedding {name:?} is there with {field} {}, and cannot be opened with {field} {value}",
            has.get(field).unwrap_or(&serde_json::Value::Null)
        )),
    }
}

/// The store of this name.
///
/// # Errors
/// [`Error::NotFound`], with the names that there are.
pub fn find(name: &str) -> Result<Arc<Store>> {
    let stores = lock(&STORES);
    stores.get(name).cloned().ok_or_else(|| {
        let names: Vec<&str> = stores.keys().map(String::as_str).collect();
        Error::NotFound(format!(
            "there is no embedding {name:?}; there are {names:?}"
        ))
    })
}

/// Takes a name away. The store goes when nobody holds it any more.
pub fn forget(name: &str) -> bool {
    lock(&STORES).remove(name).is_some()
}

/// All names.
pub fn names() -> Vec<String> {
    lock(&STORES).keys().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_store_and_other_options_are_refused() {
        let one = open("registry/a", Options::new(4)).unwrap();
        let two = open("registry/a", Options::new(4)).unwrap();
        assert!(Arc::ptr_eq(&one, &two));
        let message = open("registry/a", Options::new(8)).unwrap_err().to_string();
        assert!(
            message.contains("dim 4") && message.contains("dim 8"),
            "{message}"
        );
        assert!(names().contains(&"registry/a".to_owned()));
        assert!(forget("registry/a") && !forget("registry/a"));
        assert!(
            find("registry/a")
                .unwrap_err()
                .to_string()
                .contains("no embedding")
        );
    }
}
