//! Prints the C header of libgdev.so.

use std::path::Path;

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).expect("its settings");
    let bindings = cbindgen::Builder::new().with_config(config).with_crate(folder).generate().expect("a header");
    bindings.write(std::io::stdout());
}
