//! Guest program that uses the render node of a VM's CUDA function and checks the results.
//!
//! `check` tests blobs, doorbells and waits with the worker `probe-worker`. `hold` waits until the test kills it.
//! `lose` terminates its worker, and waits for the notification. `refused` expects the device to be full.
//!
//! UNSAFETY: accesses words in blobs as atomics, because the worker changes them concurrently.

#![expect(unsafe_code, reason = "words in shared memory")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use cuda_ring::{ADDRESSES, Blob, BlobKind, PINNED_ADDRESSES, Transport, control, state};
use render_node::RenderTransport;

/// Number of threads that wait concurrently.
const THREADS: u64 = 8;
/// Number of waits per thread.
const ROUNDS: u64 = 20;
/// Size of a pinned blob in bytes.
const PINNED_BYTES: u64 = 4 << 20;

fn main() -> Result<()> {
    let mode = std::env::args().nth(1).unwrap_or_default();
    match mode.as_str() {
        "check" => check(),
        "hold" => hold(),
        "lose" => lose(),
        "refused" => refused(),
        _ => bail!("`check`, `hold`, `lose` or `refused`"),
    }
}

/// Returns the 64-bit word at an offset in a blob.
fn word(blob: &Blob, offset: u64) -> &AtomicU64 {
    assert!(offset + 8 <= blob.bytes && offset.is_multiple_of(8), "outside of the blob");
    let place = std::ptr::with_exposed_provenance_mut((blob.address + offset) as usize);
    // SAFETY: the word is in the blob's mapping, which exists until the blob is removed.
    unsafe { AtomicU64::from_ptr(place) }
}

fn open() -> Result<(RenderTransport, Blob)> {
    let transport = RenderTransport::open().context("no CUDA here")?;
    let control = transport.create(BlobKind::Control, control::BYTES, None).context("the control blob")?;
    Ok((transport, control))
}

/// Makes the worker copy `value` from HEAD to TAIL.
fn ring(transport: &RenderTransport, control: &Blob, value: u64) -> Result<()> {
    word(control, control::HEAD).store(value, Ordering::Release);
    transport.doorbell().context("the doorbell")
}

/// Waits until TAIL reaches a value.
fn reached(transport: &RenderTransport, control: &Blob, value: u64) -> Result<()> {
    while word(control, control::TAIL).load(Ordering::Acquire) < value {
        ensure!(word(control, control::STATE).load(Ordering::Acquire) != state::LOST, "the worker has ended");
        transport.wait(control::TAIL, value).context("a wait")?;
    }
    Ok(())
}

fn check() -> Result<()> {
    let (transport, control) = open()?;
    let others = [control::STATE, control::TAIL, control::SLOTS, control::BYTES - 8];
    ensure!(others.iter().all(|&at| word(&control, at).load(Ordering::Acquire) == 0), "a new blob is not zero");
    ring(&transport, &control, 1)?;
    reached(&transport, &control, 1)?;
    println!("doorbell and wait");

    for at in [PINNED_ADDRESSES, ADDRESSES.end - PINNED_BYTES] {
        let blob = transport.create(BlobKind::Pinned, PINNED_BYTES, Some(at)).context("a blob at an address")?;
        ensure!(blob.address == at, "it is at {:#x}", blob.address);
        ensure!(word(&blob, PINNED_BYTES - 8).load(Ordering::Acquire) == 0, "a new blob is not zero");
        word(&blob, 0).store(at, Ordering::Release);
        word(&blob, PINNED_BYTES - 8).store(at, Ordering::Release);
        let next = word(&control, control::HEAD).load(Ordering::Acquire) + 1;
        ring(&transport, &control, next)?;
        reached(&transport, &control, next)?;
        ensure!(word(&blob, 8).load(Ordering::Acquire) == at + 1, "the worker has different memory");
        transport.remove(blob, at == PINNED_ADDRESSES).context("removal")?;
    }
    println!("blobs at chosen addresses");

    let begin = word(&control, control::HEAD).load(Ordering::Acquire);
    thread::scope(|scope| {
        let (transport, control) = (&transport, &control);
        let waits = (1..=THREADS).map(|thread| {
            scope.spawn(move || (1..=ROUNDS).try_for_each(|round| reached(transport, control, begin + round * thread)))
        });
        let waits: Vec<_> = waits.collect();
        for value in begin + 1..=begin + THREADS * ROUNDS {
            ring(transport, control, value)?;
        }
        waits.into_iter().try_for_each(|wait| wait.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
    })?;
    println!("{} waits of {THREADS} threads", THREADS * ROUNDS);

    ensure!(transport.create(BlobKind::Pinned, 1 << 40, None).is_err(), "a blob larger than the window was created");
    let before = transport.create(BlobKind::Pinned, PINNED_BYTES, None)?;
    word(&before, 0).store(7, Ordering::Release);
    transport.remove(before, false)?;
    let after = transport.create(BlobKind::Pinned, PINNED_BYTES, None)?;
    ensure!(word(&after, 0).load(Ordering::Acquire) == 0, "a blob has the contents of an earlier one");
    println!("all is well");
    Ok(())
}

fn hold() -> Result<()> {
    let (transport, control) = open()?;
    ring(&transport, &control, 1)?;
    reached(&transport, &control, 1)?;
    println!("holding");
    reached(&transport, &control, 2)
}

fn lose() -> Result<()> {
    let (transport, control) = open()?;
    ring(&transport, &control, u64::MAX)?;
    ensure!(reached(&transport, &control, 1).is_err(), "the worker keeps running");
    println!("lost");
    Ok(())
}

fn refused() -> Result<()> {
    let transport = RenderTransport::open().context("no CUDA here")?;
    match transport.create(BlobKind::Control, control::BYTES, None) {
        Ok(_) => bail!("the device accepted another program"),
        Err(error) => println!("refused: {error}"),
    }
    Ok(())
}
