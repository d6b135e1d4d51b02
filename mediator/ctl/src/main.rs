//! The operator's tool; see `mediatorctl --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    mediatorctl::main()
}
