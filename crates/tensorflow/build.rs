//! The linker's part: TensorFlow never unloads an op library, and a kernel may run while the process ends.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
