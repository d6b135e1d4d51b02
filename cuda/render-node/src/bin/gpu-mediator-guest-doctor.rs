//! Checks whether a guest can use CUDA. Prints the result of each check, and a remedy for each obstacle. Exits with
//! status 1 if it finds an obstacle.

use std::io::Write as _;
use std::process::ExitCode;

use render_node::doctor::{Finding, Guest};

fn main() -> ExitCode {
    if std::env::args_os().len() > 1 {
        println!("usage: gpu-mediator-guest-doctor\n\nChecks whether programs in this virtual machine can use CUDA.");
        return ExitCode::from(2);
    }
    let findings = Guest::this().findings();
    let mut output = std::io::stdout().lock();
    for Finding { check, found, remedy } in &findings {
        let state = if remedy.is_some() { "MISSING" } else { "ok" };
        let _ = writeln!(output, "{state:8} {check:12} {found}");
    }
    for Finding { check, remedy, .. } in &findings {
        if let Some(remedy) = remedy {
            let _ = writeln!(output, "\n{check}: {remedy}");
        }
    }
    let is_good = findings.iter().all(|finding| finding.remedy.is_none());
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
