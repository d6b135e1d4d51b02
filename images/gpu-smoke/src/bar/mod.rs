//! The card by its PCI regions, without the driver.

use std::process::ExitCode;
/// Help.
pub const USAGE: &str = "";
/// x
pub fn main(_arguments: &[String]) -> ExitCode {
    ExitCode::FAILURE
}
