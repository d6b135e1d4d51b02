//! Measures how fast chunks are created on a card and copied, and how fast NVIDIA's checkpoint saves and restores a
//! process with the same amount of memory.

use crate::{Driver, Real, Speeds};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Card memory that must be free in addition to the chunks, in bytes.
const MARGIN_BYTES: u64 = 2 << 30;

/// Measures chunks of `chunk` bytes each and `bytes` bytes in total. `checkpoint` contains the command that starts a
/// process that calls [`hold`], and the time limit for its checkpoint.
///
/// # Errors
/// Returns an error if the sizes are invalid or exceed the free memory, or a chunk cannot be created or copied.
pub fn report(driver: &Real, bytes: u64, chunk: u64, checkpoint: Option<(Command, Duration)>) -> Result<Value, String> {
    let free = driver.free_bytes().map_err(|error| error.to_string())?;
    if !bytes.is_multiple_of(chunk.max(1)) || free < 2 * bytes + MARGIN_BYTES {
        let gib = bytes >> 30;
        return Err(format!(
            "the card has no space for twice {gib} GiB, or this is not a whole number of chunks: use a smaller size"
        ));
    }
    let speeds = Speeds::measure(driver, bytes, chunk).map_err(|error| error.to_string())?;
    let mut result = json!({
        "device": driver.device().name,
        "gib": bytes >> 30,
        "chunk_mib": chunk >> 20,
        "make_card_s": speeds.make_card_s,
        "make_host_s": speeds.make_host_s,
        "out_gb_per_s": speeds.out_gb_per_s,
        "in_gb_per_s": speeds.in_gb_per_s,
        "both_gb_per_s_each": speeds.both_gb_per_s_each,
    });
    if let Some((command, limit)) = checkpoint {
        let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
        result["checkpoint"] = match measured_checkpoint(driver, command, limit) {
            Ok((out_s, in_s)) => {
                json!({ "out_s": out_s, "in_s": in_s, "out_gb_per_s": rate(out_s), "in_gb_per_s": rate(in_s) })
            }
            Err(error) => json!({ "error": error }),
        };
    }
    Ok(result)
}

/// A process that is killed on drop.
struct Holder(Child);

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the times in seconds that the driver takes to checkpoint and to restore a process.
fn measured_checkpoint(driver: &Real, mut command: Command, limit: Duration) -> Result<(f64, f64), String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut holder = Holder(command.spawn().map_err(|error| error.to_string())?);
    let mut line = String::new();
    let output = holder.0.stdout.take().ok_or("the process to be checkpointed has no output")?;
    BufReader::new(output).read_line(&mut line).map_err(|error| error.to_string())?;
    if line.trim() != "held" {
        return Err("the process to be checkpointed has no memory".to_owned());
    }
    let pid = holder.0.id();
    std::thread::scope(|scope| {
        let (done, ended) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || {
            if ended.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                // A driver call that hangs cannot be cancelled.
                tracing::error!("the checkpoint took longer than {} s", limit.as_secs());
                std::process::exit(1);
            }
        });
        let start = Instant::now();
        driver.suspend(pid).map_err(|error| error.to_string())?;
        let out_s = start.elapsed().as_secs_f64();
        let start = Instant::now();
        driver.resume(pid).map_err(|error| error.to_string())?;
        drop(done);
        Ok((out_s, start.elapsed().as_secs_f64()))
    })
}

/// Allocates card memory, and keeps it until end of file on standard input.
///
/// # Errors
/// Returns an error if the memory cannot be allocated, or the standard streams fail.
pub fn hold(driver: &Real, bytes: u64) -> Result<(), String> {
    driver.hold_plainly(bytes).map_err(|error| error.to_string())?;
    let mut output = std::io::stdout();
    let told = writeln!(output, "held").and_then(|()| output.flush());
    told.and_then(|()| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()))
        .map_err(|error| error.to_string())?;
    Ok(())
}
