//! A receiving daemon for tests of the sending daemon. It fails at the step named in the file `PROGRAM.step`, next to
//! its executable.

use std::fs;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::Duration;

use card_manager::SavedHost;
use handover::{Introduction, Receiver};
use saved_state::Known;
use simgpu::SavedCard;
use vgpu::SavedSide;
use vmm_glue::SavedClients;

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    match fail() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("faulty_receiver: {error}");
            ExitCode::FAILURE
        }
    }
}

fn fail() -> Result<(), Box<dyn std::error::Error>> {
    let step = fs::read_to_string(std::env::current_exe()?.with_extension("step"))?;
    let step = step.trim();
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    let mut reads = SavedHost::known();
    reads.extend(SavedSide::known());
    reads.extend([Known::for_part::<SavedCard>(), Known::for_part::<SavedClients>()]);
    reads.push(Known { name: "mediatord".to_owned(), version: 1 });
    if step == "reads less" {
        reads.truncate(2);
    }
    let receiver = Receiver::connect(socket, &Introduction { program: "of another".to_owned(), reads })?;
    if step == "exits after its introduction" {
        return Ok(());
    }
    let given = receiver.take(WAIT_TIMEOUT)?;
    assert!(!given.descriptors.is_empty());
    match step {
        "exits after receiving everything" => {}
        "is silent" => std::thread::sleep(WAIT_TIMEOUT),
        "refuses" => receiver.refuse("it refuses, as the test requested")?,
        "exits when it is ready" => receiver.ready()?,
        _ => receiver.ready().map(drop).and_then(|()| receiver.wait(WAIT_TIMEOUT))?,
    }
    Ok(())
}
