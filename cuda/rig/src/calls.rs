//! Measures the cost of individual calls for the benchmark.

use std::time::Instant;

use anyhow::Result;
use serde_json::{Value, json};

use crate::Cuda;

/// Returns the mean duration of a call in nanoseconds, over `count` calls.
fn each(count: u32, mut call: impl FnMut(u32) -> Result<()>) -> Result<f64> {
    // Warm up: trigger all one-time allocations.
    for number in 0..count / 10 {
        call(number)?;
    }
    let begin = Instant::now();
    for number in 0..count {
        call(number)?;
    }
    Ok(begin.elapsed().as_nanos() as f64 / f64::from(count))
}

/// Measures frequent calls, `count` of each. Returns each call's lowest mean duration over several rounds, in ns.
pub fn measure(cuda: Cuda, count: u32) -> Result<Value> {
    const ROUNDS: usize = 5;
    const SIZES: [u64; 5] = [1, 3, 7, 4, 2];
    let stream = cuda.stream()?;
    let word = cuda.alloc(1 << 20)?;
    let mut best = [f64::MAX; 5];
    for _ in 0..ROUNDS {
        let submit = each(count, |_| Ok(cuda.set_async(word, 0, 64, stream)?))?;
        cuda.finish(stream)?;
        let ordered = each(count, |n| {
            let at = cuda.alloc_async(SIZES[n as usize % SIZES.len()] << 22, stream)?;
            Ok(cuda.free_async(at, stream)?)
        })?;
        let mut live = Vec::new();
        let allocate = each(count / 11, |n| {
            live.push(cuda.alloc(SIZES[n as usize % SIZES.len()] << 14)?);
            Ok(())
        })?;
        let attribute = each(count, |_| Ok(cuda.attribute(2, word).map(drop)?))?;
        let mut live = live.into_iter();
        let free = each(count / 11, |_| live.next().map_or(Ok(()), |at| Ok(cuda.free(at)?)))?;
        cuda.finish_all()?;
        for (best, now) in best.iter_mut().zip([submit, ordered, allocate, free, attribute]) {
            *best = best.min(now);
        }
    }
    let names = ["submit", "alloc_and_free_in_a_stream", "alloc", "free", "pointer_attribute"];
    Ok(names
        .into_iter()
        .zip(best)
        .map(|(name, ns)| (name.to_owned(), json!(ns.round())))
        .collect::<serde_json::Map<_, _>>()
        .into())
}
