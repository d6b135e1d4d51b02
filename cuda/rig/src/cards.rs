//! Programs that use several cards in one process.
//!
//! UNSAFETY: forks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::Cuda;

/// Size of a buffer in bytes.
const BUFFER: u64 = 3 << 20;
/// Number of words that kernels modify in each buffer.
const WORDS: u64 = BUFFER / 8 / 64;
/// Size of the memory of each handle that the program maps itself, in bytes.
const PIECE: u64 = 2 << 20;

/// Returns a [`Cuda`] for each device, with the device's primary context.
pub fn all(cuda: Cuda) -> Result<Vec<Cuda>> {
    let count = cuda.count()?;
    (0..count).map(|device| Ok(cuda.on(device)?)).collect()
}

/// Describes each device as the program sees it.
pub fn look(cuda: Cuda) -> Result<Value> {
    let mut devices = Vec::new();
    for ordinal in 0..cuda.count()? {
        let device = cuda.device(ordinal)?;
        let on = cuda.on(device)?;
        let (free, total) = on.info()?;
        let uuid = String::from_utf8_lossy(&cuda.uuid_of(device)?).into_owned();
        let address = cuda.bus_id(device)?;
        ensure!(cuda.by_bus_id(&address)? == device, "{address} is another device");
        devices.push(json!([uuid, address, cuda.total_of(device)? >> 20, free >> 20, total >> 20]));
    }
    Ok(devices.into())
}

/// A workload on one device. Its result depends only on the arguments.
pub struct Work {
    cuda: Cuda,
    stream: u64,
    buffers: Vec<u64>,
    kernels: [u64; 3],
    graph: u64,
    result: u64,
    rounds: u64,
}

impl Work {
    /// Allocates and fills `mib` MiB of memory in the context of `cuda`.
    pub fn new(cuda: Cuda, mib: u64, seed: u64) -> Result<Self> {
        /// Held by a thread that captures, because an allocation in another thread would invalidate the capture.
        static CAPTURES: Mutex<()> = Mutex::new(());
        let _one = CAPTURES.lock().unwrap_or_else(PoisonError::into_inner);
        cuda.enter()?;
        let kernels = [cuda.kernel("fill")?, cuda.kernel("add")?, cuda.kernel("checksum")?];
        let (stream, result) = (cuda.stream()?, cuda.alloc(4096)?);
        let buffers: Vec<u64> = (0..(mib << 20) / BUFFER).map(|_| cuda.alloc(BUFFER)).collect::<Result<_, _>>()?;
        for (n, at) in buffers.iter().enumerate() {
            cuda.launch(kernels[0], &[*at, WORDS, seed + n as u64], stream)?;
        }
        cuda.finish(stream)?;
        let add = || buffers.iter().try_for_each(|at| cuda.launch(kernels[1], &[*at, WORDS, 3], stream));
        let graph = cuda.capture(stream, add)?;
        Ok(Self { cuda, stream, buffers, kernels, graph, result, rounds: 0 })
    }

    /// Increments each word, alternately through the graph and through launches, and makes a stream-ordered allocation.
    pub fn step(&mut self) -> Result<()> {
        let (cuda, stream) = (self.cuda, self.stream);
        cuda.enter()?;
        if self.rounds.is_multiple_of(2) {
            cuda.graph(self.graph, stream)?;
        } else {
            let add = |at: &u64| cuda.launch(self.kernels[1], &[*at, WORDS, self.rounds], stream);
            self.buffers.iter().try_for_each(add)?;
        }
        let small = cuda.alloc_async(1000, stream)?;
        cuda.launch(self.kernels[0], &[small, 10, self.rounds], stream)?;
        cuda.free_async(small, stream)?;
        self.rounds += 1;
        Ok(())
    }

    /// Returns a checksum of all buffers.
    pub fn checksum(&self) -> Result<u64> {
        self.cuda.enter()?;
        let mut total = 0u64;
        for at in &self.buffers {
            self.cuda.launch(self.kernels[2], &[*at, WORDS, self.result], self.stream)?;
            self.cuda.finish(self.stream)?;
            total = total.rotate_left(7) ^ self.cuda.read(self.result, 1)?[0];
        }
        Ok(total)
    }
}

/// Joins a thread and returns its result.
fn joined<T>(thread: std::thread::JoinHandle<Result<T>>) -> Result<T> {
    thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
}

/// Runs the workload on each device with `threads` threads per context or, if `threads` is 0, on all devices in one
/// thread that switches contexts. Returns the checksums, ordered by device and thread.
pub fn train(cuda: Cuda, mib: u64, rounds: u64, threads: u64) -> Result<String> {
    let work = move |on: Cuda, seed: u64| -> Result<u64> {
        let mut work = Work::new(on, mib, seed)?;
        for _ in 0..rounds {
            work.step()?;
        }
        work.checksum()
    };
    let cards = all(cuda)?;
    let mut sums = Vec::new();
    if threads == 0 {
        let make = |(device, on): (usize, &Cuda)| Work::new(*on, mib, device as u64);
        let mut works = cards.iter().enumerate().map(make).collect::<Result<Vec<_>>>()?;
        for _ in 0..rounds {
            works.iter_mut().try_for_each(Work::step)?;
        }
        sums = works.iter().map(Work::checksum).collect::<Result<_>>()?;
    } else {
        let mut running = Vec::new();
        for (device, on) in cards.into_iter().enumerate() {
            running.extend((0..threads).map(|n| std::thread::spawn(move || work(on, device as u64 * 100 + n))));
        }
        for thread in running {
            sums.push(joined(thread)?);
        }
    }
    Ok(sums.iter().map(|sum| format!("{sum:016x}")).collect::<Vec<_>>().join(" "))
}

/// Copies a buffer around the ring of devices in several ways, and modifies it on each device.
pub fn copies(cuda: Cuda, rounds: u64) -> Result<String> {
    let cards = all(cuda)?;
    let mut buffers = Vec::new();
    for on in &cards {
        on.enter()?;
        buffers.push((on.alloc(BUFFER)?, on.stream()?, on.kernel("add")?));
    }
    cards[0].enter()?;
    cards[0].launch(cards[0].kernel("fill")?, &[buffers[0].0, WORDS, 5], buffers[0].1)?;
    cards[0].finish(buffers[0].1)?;
    let mut added = 5;
    for round in 0..rounds {
        for from in 0..cards.len() {
            let to = (from + 1) % cards.len();
            let ((source, stream, _), (target, other, add)) = (buffers[from], buffers[to]);
            let (here, there) = (cards[from], cards[to]);
            here.enter()?;
            match round % 4 {
                0 => here.copy_to(there, target, source, BUFFER)?,
                1 => here.copy_to_async(there, target, source, BUFFER, stream)?,
                // The stream's context need not be current.
                2 => there.enter().and_then(|()| there.copy(target, source, BUFFER, stream))?,
                _ => here.copy(target, source, BUFFER, 0).and_then(|()| here.finish(0))?,
            }
            here.enter()?;
            here.finish(stream)?;
            there.enter()?;
            there.launch(add, &[target, WORDS, round + 1], other)?;
            there.finish(other)?;
            added += round + 1;
        }
        let found = cards[0].enter().and_then(|()| cards[0].read(buffers[0].0, 2))?;
        ensure!(found == [added, added + 1], "round {round}: {found:?} instead of {added}");
    }
    Ok(format!("copied {added}"))
}

/// Uses the second device's memory on the first device. Returns the results of individual calls, including invalid
/// ones, and the total that the kernels have added to each word.
pub fn peers(cuda: Cuda, rounds: u64) -> Result<String> {
    let cards = all(cuda)?;
    let (first, second) = (cards[0], *cards.get(1).context("expected two devices")?);
    let code = |result: Result<(), crate::Failed>| result.err().map_or(0, |failed| failed.code);
    let mut codes = vec![cuda.can_access(0, 1)?, cuda.can_access(0, 0)?];
    second.enter()?;
    let before = second.alloc(BUFFER)?;
    codes.push(code(first.disable(second)));
    first.enable(second)?;
    codes.push(code(first.enable(second)));
    codes.push(code(first.enable(first)));
    second.enter()?;
    // Memory that is allocated later is accessible as well.
    let after = second.alloc(BUFFER)?;
    first.enter()?;
    let (stream, fill, add) = (first.stream()?, first.kernel("fill")?, first.kernel("add")?);
    for at in [before, after] {
        first.launch(fill, &[at, WORDS, 1], stream)?;
    }
    first.finish(stream)?;
    let mut added = 1;
    for round in 0..rounds {
        // Both devices modify the memory in turn.
        for on in [first, second] {
            on.enter()?;
            for at in [before, after] {
                on.launch(add, &[at, WORDS, round + 1], if on.is_same(first) { stream } else { 0 })?;
            }
            on.finish_all()?;
            added += round + 1;
        }
        for at in [before, after] {
            let found = second.read(at, 2)?;
            ensure!(found == [added, added + 1], "round {round}: {found:?} instead of {added}");
        }
    }
    second.enter()?;
    let spare = second.alloc(BUFFER)?;
    second.free(spare)?;
    // Memory of another card can be freed and queried.
    first.enter()?;
    let range = first.range(before + 8)?;
    ensure!(range.0 == before && range.1 >= BUFFER, "{range:?}");
    codes.push(first.attribute(9, before)? as i32);
    first.disable(second)?;
    first.enter()?;
    first.free(before)?;
    codes.push(code(first.launch_on_all(2)));
    codes.push(code(first.open_pool(1)));
    Ok(format!("{codes:?} {added}"))
}

/// Uses the second device's memory on the first device without access rights. The access must destroy the program's
/// context.
pub fn trespass(cuda: Cuda, disables: bool) -> Result<String> {
    let cards = all(cuda)?;
    let (first, second) = (cards[0], *cards.get(1).context("expected two devices")?);
    second.enter()?;
    let at = second.alloc(BUFFER)?;
    second.set(at, 0, BUFFER)?;
    if disables {
        first.enable(second)?;
        first.launch(first.kernel("fill")?, &[at, WORDS, 1], 0)?;
        first.finish(0)?;
        first.disable(second)?;
    }
    first.enter()?;
    first.launch(first.kernel("fill")?, &[at, WORDS, 1], 0)?;
    first.finish(0)?;
    Ok("trespassed".to_owned())
}

/// Maps memory of all devices in one address range, gives each device access to the whole range, and uses it on each
/// device.
pub fn ranges(cuda: Cuda, rounds: u64) -> Result<String> {
    let cards = all(cuda)?;
    let count = cards.len() as u64;
    let bytes = 2 * count * PIECE;
    let base = cuda.reserve(bytes)?;
    let devices: Vec<i32> = (0..count as i32).collect();
    let mut handles = Vec::new();
    for n in 0..2 * count {
        let handle = cuda.create_of([1, 0, 1, (n % count) as i32, 0, 0, 0, 0], PIECE, 0)?;
        cuda.map_at(base + n * PIECE, PIECE, 0, handle)?;
        handles.push(handle);
    }
    let part = cuda.unmap_at(base + PIECE / 2, PIECE).err().map_or(0, |failed| failed.code);
    cuda.allow_all(base, bytes, &devices)?;
    let access: Vec<u64> = devices.iter().map(|device| cuda.access_of(*device, base)).collect::<Result<_, _>>()?;
    let words = bytes / 8;
    let mut added = 7;
    for (n, on) in cards.iter().enumerate() {
        on.enter()?;
        on.launch(on.kernel(if n == 0 { "fill" } else { "add" })?, &[base, words, 7], 0)?;
        on.finish(0)?;
        added += if n == 0 { 0 } else { 7 };
    }
    for round in 0..rounds {
        for on in &cards {
            on.enter()?;
            on.launch(on.kernel("add")?, &[base, words, round], 0)?;
            on.finish(0)?;
            added += round;
        }
    }
    for n in 0..2 * count {
        let found = cards[0].enter().and_then(|()| cards[0].read(base + n * PIECE, 1))?;
        let expected = added + n * PIECE / 8;
        ensure!(found == [expected], "piece {n}: {found:?} instead of {expected}");
    }
    cuda.unmap_at(base, bytes)?;
    handles.into_iter().try_for_each(|handle| cuda.release(handle))?;
    cuda.unreserve(base, bytes)?;
    Ok(format!("{part} {access:?} {added}"))
}

/// Allocates memory on each device until an allocation fails. Returns the total sizes in MiB.
pub fn fill(cuda: Cuda, step_mib: u64) -> Result<String> {
    let mut all_mib = Vec::new();
    for on in all(cuda)? {
        on.enter()?;
        let mut mib = 0;
        while mib < 1 << 16 {
            match on.alloc(step_mib << 20) {
                Ok(at) => on.set(at, 1, step_mib << 20)?,
                Err(failed) if failed.code == 2 => break,
                Err(failed) => return Err(failed.into()),
            }
            mib += step_mib;
        }
        all_mib.push(mib.to_string());
    }
    Ok(all_mib.join(" "))
}

/// Works on each device in a separate thread until `input` is closed. For each line `N`, prints the progress on device
/// N since the last such line. For `alloc N`, allocates 4 MiB on device N and prints the result code. For `card N`,
/// prints the device's UUID.
pub fn live(cuda: Cuda, mib: u64, input: &Receiver<String>, print: impl Fn(&str)) -> Result<()> {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    let end = Arc::new(AtomicBool::new(false));
    let cards = all(cuda)?;
    let mut running = Vec::new();
    for (device, on) in cards.iter().copied().enumerate() {
        let (steps, end) = (Arc::new(AtomicU64::new(0)), Arc::clone(&end));
        let counted = Arc::clone(&steps);
        let work = move || -> Result<u64> {
            let mut work = Work::new(on, mib, device as u64)?;
            while !end.load(Ordering::SeqCst) {
                work.step()?;
                on.finish(work.stream)?;
                counted.fetch_add(1, Ordering::SeqCst);
            }
            work.checksum()
        };
        running.push((steps, std::thread::spawn(work)));
    }
    print("ready");
    while let Ok(line) = input.recv() {
        let (order, number) = line.rsplit_once(' ').unwrap_or(("", line.as_str()));
        let device: usize = number.parse()?;
        if order == "alloc" {
            let on = *cards.get(device).context("a device")?;
            let result = on.enter().and_then(|()| on.alloc(4 << 20));
            print(&result.err().map_or(0, |failed| failed.code).to_string());
        } else if order == "card" {
            let uuid = cuda.uuid_of(i32::try_from(device)?);
            print(
                &uuid.map_or_else(|failed| failed.code.to_string(), |uuid| String::from_utf8_lossy(&uuid).into_owned()),
            );
        } else {
            let steps = running.get(device).map_or(0, |(steps, _)| steps.swap(0, Ordering::SeqCst));
            print(&steps.to_string());
        }
    }
    end.store(true, Ordering::SeqCst);
    for (_, thread) in running {
        joined(thread)?;
    }
    print("ended");
    Ok(())
}

/// Creates and destroys contexts with streams and peer access, so that the driver reuses their handles.
pub fn contexts(cuda: Cuda, rounds: u64) -> Result<String> {
    let cards = all(cuda)?;
    let fill = cards[0].kernel("fill")?;
    for round in 0..rounds {
        for device in 0..cards.len() {
            let own = cuda.another_on(device as i32)?;
            let peer = cards[(device + 1) % cards.len()];
            own.enable(peer)?;
            peer.enter()?;
            let there = peer.alloc(BUFFER)?;
            own.enter()?;
            let (stream, here) = (own.stream()?, own.alloc(BUFFER)?);
            for at in [here, there] {
                own.launch(fill, &[at, WORDS, round], stream)?;
            }
            own.finish(stream)?;
            ensure!(own.read(there, 2)? == [round, round + 1], "round {round}");
            own.free(here)?;
            own.destroy(stream)?;
            own.end_context()?;
            peer.enter()?;
            peer.free(there)?;
        }
    }
    Ok("contexts ended".to_owned())
}

/// Runs `rounds` rounds of kernels that spin until their peers on the other devices run. The thread of each device has
/// up to `ahead` rounds in flight. Returns the number of rounds.
pub fn meet(cuda: Cuda, rounds: u64, kernel_us: u64, ahead: u64) -> Result<String> {
    let cards = all(cuda)?;
    let ranks = cards.len() as u64;
    // Round number of each device, which kernels read and write. The memory is never freed.
    let words: &'static [AtomicU64] = Box::leak((0..ranks).map(|_| AtomicU64::new(0)).collect());
    let address = words.as_ptr() as u64;
    let work = move |(rank, on): (u64, Cuda)| -> Result<u64> {
        on.enter()?;
        let (kernel, stream) = (on.kernel("meet")?, on.stream()?);
        for round in 1..=rounds {
            on.launch(kernel, &[address, ranks, rank, round, kernel_us], stream)?;
            if round % ahead.max(1) == 0 {
                on.finish(stream)?;
            }
        }
        on.finish(stream)?;
        Ok(words[rank as usize].load(Ordering::SeqCst))
    };
    let running: Vec<_> = (0..ranks).zip(cards).map(|card| std::thread::spawn(move || work(card))).collect();
    let reached = running.into_iter().map(joined).collect::<Result<Vec<_>>>()?;
    ensure!(reached.iter().all(|round| *round == rounds), "the devices have reached {reached:?}");
    Ok(format!("met {rounds}"))
}

/// Runs the workload on each device, and forks while it runs. Each child calls the driver for each device, and exits. A
/// child has no context, so its calls must fail. Returns the checksums.
#[allow(unsafe_code, reason = "forks")]
pub fn fork(cuda: Cuda, mib: u64, rounds: u64) -> Result<String> {
    let cards = all(cuda)?;
    let work = move |(device, on): (usize, Cuda)| -> Result<u64> {
        let mut work = Work::new(on, mib, device as u64)?;
        for _ in 0..rounds {
            work.step()?;
        }
        work.checksum()
    };
    let running: Vec<_> =
        cards.iter().copied().enumerate().map(|card| std::thread::spawn(move || work(card))).collect();
    let mut children = 0;
    while children < 4 || running.iter().any(|thread| !thread.is_finished()) {
        // SAFETY: the child calls only the library, whose functions check the process first, and exits without running
        // the parent's code.
        let child = unsafe { libc::fork() };
        ensure!(child >= 0, "cannot fork: {}", std::io::Error::last_os_error());
        if child == 0 {
            let works = cards.iter().any(|on| on.enter().and_then(|()| on.alloc(1 << 20)).is_ok());
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(works)) };
        }
        let mut status = 0;
        // SAFETY: this process created the child.
        let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
        ensure!(ended == child && status == 0, "a child ended with {status}");
        children += 1;
    }
    let sums = running.into_iter().map(joined).collect::<Result<Vec<_>>>()?;
    Ok(sums.iter().map(|sum| format!("{sum:016x}")).collect::<Vec<_>>().join(" "))
}
