//! The linker's part: the library stays loaded (its threads run its code), and keeps its symbols.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
