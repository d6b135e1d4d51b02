//! The operator's tool, see `mediatorctl --help`.

use std::io;
use std::process::ExitCode;

fn main() -> ExitCode {
    let code = mediatorctl::run(std::env::args_os(), &mut io::stdout().lock(), &mut io::stderr().lock());
    ExitCode::from(code as u8)
}
