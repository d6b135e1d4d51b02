//! Compiles the protocol definitions. The host does not need a protocol compiler.

use std::error::Error;

const FILES: [&str; 9] = [
    "pluginregistration.proto",
    "dra_v1.proto",
    "dra_v1beta1.proto",
    "health_v1alpha1.proto",
    "health_v1beta1.proto",
    "health_v1.proto",
    "hooks_info.proto",
    "hooks_v1alpha2.proto",
    "hooks_v1alpha3.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    // The generated code contains no transport, because each client chooses its own transport.
    tonic_prost_build::configure().build_transport(false).include_file("protocols.rs").compile_fds(descriptors)?;
    Ok(())
}
