//! A test program that uses NVIDIA's CUDA runtime. It loads the given `libcudart.so`, uses each part of its API, and
//! verifies all results.

use std::ffi::OsString;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use cuda_rig::runtime::Runtime;

#[derive(Parser)]
struct Args {
    /// Path of the runtime library.
    library: OsString,
    /// Number of words per buffer.
    #[arg(long, default_value_t = 100_000)]
    words: u64,
}

/// `cudaDevAttrWarpSize`.
const WARP_SIZE: i32 = 10;

fn main() -> Result<()> {
    let args = Args::parse();
    let runtime = Runtime::load(&args.library)?;
    let (own, driver) = runtime.versions()?;
    let count = runtime.count()?;
    ensure!(count > 0, "no device");
    println!("runtime={own} driver={driver} devices={count} warp={}", runtime.attribute(WARP_SIZE)?);
    // The second round starts after a reset, with a new context.
    for round in 0..2 {
        work(&runtime, args.words, round).with_context(|| format!("round {round}"))?;
        runtime.reset()?;
        println!("round={round} reset");
    }
    Ok(())
}

/// Uses each part of the runtime's API.
fn work(runtime: &Runtime, words: u64, round: u64) -> Result<()> {
    let length = usize::try_from(words)?;
    let at = runtime.malloc(8 * length)?;
    let source: Vec<u64> = (0..words).map(|i| i * i + round).collect();
    runtime.upload(at, &source)?;
    ensure!(runtime.download(at, length)? == source, "a copy differs");
    runtime.memset(at, 0x5A, 8 * length)?;
    let filled = runtime.download(at, length)?;
    ensure!(filled.iter().all(|word| *word == 0x5A5A_5A5A_5A5A_5A5A), "a fill differs");

    runtime.launch_fill(0, at, words, 1000 + round)?;
    runtime.finish_all()?;
    check(&runtime.download(at, length)?, 1000 + round, "a launch")?;

    let stream = runtime.stream()?;
    let ms = runtime.timed(stream, || runtime.launch_fill(stream, at, words, 2000))?;
    ensure!(ms >= 0.0, "a negative time");
    check(&runtime.download_in(stream, at, length)?, 2000, "a launch in a stream")?;

    let half = words / 2;
    runtime.graph(stream, 3, || {
        runtime.launch_fill(stream, at, half, 3000)?;
        runtime.launch_fill(stream, at + 8 * half, words - half, 3000 + half)
    })?;
    check(&runtime.download_in(stream, at, length)?, 3000, "a graph")?;
    runtime.end_stream(stream)?;
    runtime.free(at)?;
    println!("round={round} words={words} verified");
    Ok(())
}

/// Checks that the words count up from `first`.
fn check(words: &[u64], first: u64, source: &str) -> Result<()> {
    let wrong = words.iter().zip(first..).filter(|(word, expected)| *word != expected).count();
    ensure!(wrong == 0, "{wrong} words of {source} are wrong");
    Ok(())
}
