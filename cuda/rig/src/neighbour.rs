//! An honest program that runs next to a hostile one. The honest program keeps the card busy, requests memory, and
//! reports its progress.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::Cuda;

/// Size of a memory request in bytes: one chunk in the tests.
const REQUEST_BYTES: u64 = 2 << 20;

/// Time after which the reply to a request counts as late, in milliseconds.
pub const ANSWER_MS: f64 = 100.0;

/// Measurements of the neighbour's work and of the replies to it since its last report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Time since the last report in milliseconds of the host's clock.
    pub ms: f64,
    /// Number of submitted kernels.
    pub kernels: u64,
    /// Card time of the program's kernels, as measured by the kernels, in microseconds.
    pub card_us: u64,
    /// Maximum time between consecutive submissions, that is, the longest wait for a turn, in milliseconds.
    pub longest_wait_ms: f64,
    /// Number of requests for 2 MiB of card memory that were sent to the owner.
    pub requests: u64,
    /// Number of rejected requests.
    pub refused: u64,
    /// Longest time from a request or memory query to its reply, in milliseconds.
    pub longest_answer_ms: f64,
    /// Number of requests and queries that took longer than [`ANSWER_MS`].
    pub late: u64,
}

impl Report {
    /// Adds another report to this one.
    pub fn add(&mut self, other: &Self) {
        self.ms += other.ms;
        self.kernels += other.kernels;
        self.card_us += other.card_us;
        self.longest_wait_ms = self.longest_wait_ms.max(other.longest_wait_ms);
        self.requests += other.requests;
        self.refused += other.refused;
        self.longest_answer_ms = self.longest_answer_ms.max(other.longest_answer_ms);
        self.late += other.late;
    }
}

/// Works until `lines` is closed. Prints a [`Report`] as JSON for each line.
pub fn work(cuda: Cuda, kernel_us: u64, mib: u64, ask: Duration, lines: &Receiver<String>) -> Result<()> {
    let spin = cuda.kernel("spin")?;
    let stream = cuda.stream()?;
    let held = cuda.alloc(mib << 20)?;
    cuda.set(held, 7, mib << 20)?;
    let word = cuda.alloc(4096)?;
    cuda.set(word, 0, 8)?;
    println!("works");
    let (mut report, mut since) = (Report::default(), Instant::now());
    let (mut asked, mut submitted, mut before) = (since, since, 0);
    loop {
        cuda.launch(spin, &[kernel_us, word], stream)?;
        let now = Instant::now();
        report.kernels += 1;
        report.longest_wait_ms = report.longest_wait_ms.max((now - submitted).as_secs_f64() * 1e3);
        submitted = now;
        if now - asked >= ask {
            request(cuda, &mut report)?;
            asked = Instant::now();
            submitted = asked;
        }
        match lines.try_recv() {
            Ok(_) => {
                let us = cuda.read(word, 1)?[0];
                (report.card_us, before) = (us - before, us);
                report.ms = since.elapsed().as_secs_f64() * 1e3;
                println!("{}", serde_json::to_string(&std::mem::take(&mut report))?);
                (since, submitted) = (Instant::now(), Instant::now());
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => break,
        }
    }
    let words = cuda.read(held, 2)?;
    ensure!(words == [0x0707_0707_0707_0707; 2], "its memory has {words:x?}");
    println!("worked");
    Ok(())
}

/// Queries the free memory, and requests memory that the library has no cached chunk for.
fn request(cuda: Cuda, report: &mut Report) -> Result<()> {
    let begin = Instant::now();
    cuda.info()?;
    let answered = Instant::now();
    let got = cuda.alloc_managed(REQUEST_BYTES);
    for time in [answered - begin, answered.elapsed()] {
        let ms = time.as_secs_f64() * 1e3;
        report.longest_answer_ms = report.longest_answer_ms.max(ms);
        report.late += u64::from(ms > ANSWER_MS);
    }
    report.requests += 1;
    match got {
        Ok(at) => cuda.free(at)?,
        Err(error) if error.code == 2 => report.refused += 1,
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
