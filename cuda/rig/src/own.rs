//! Programs that manage their virtual memory themselves.

use std::fmt::Write as _;

use anyhow::{Result, ensure};

use crate::{Cuda, Failed, Location};

const MIB: u64 = 1 << 20;
/// Location that is granted access: the first card.
const CARD: Location = Location::FIRST_CARD;
/// Read and write access.
const ALL: i32 = 3;

/// Allocates and maps memory, and releases its handle immediately. The mapping keeps the memory alive.
pub fn allocate(cuda: Cuda, bytes: u64) -> Result<u64, Failed> {
    let handle = cuda.create_own(bytes)?;
    let at = cuda.map(handle, bytes)?;
    cuda.release(handle)?;
    Ok(at)
}

/// A handle and its mappings.
#[derive(Debug)]
struct Buffer {
    handle: u64,
    bytes: u64,
    at: u64,
    /// Address of the second mapping, which may be read-only.
    other: u64,
    writes: bool,
    /// Set while the handle is mapped at the first address.
    mapped: bool,
    /// Expected value of the first word.
    value: u64,
    /// Block ID of the memory, as reported by the driver.
    block: u64,
}

impl Buffer {
    fn words(&self) -> u64 {
        self.bytes / 8 / 64
    }

    /// Returns the address to use in a round.
    fn place(&self, round: u64) -> u64 {
        if self.mapped && (round.is_multiple_of(2) || !self.writes) { self.at } else { self.other }
    }

    fn check(&self, cuda: Cuda, number: usize) -> Result<()> {
        let last = 8 * (self.words() - 1);
        for at in [Some(self.at).filter(|_| self.mapped), Some(self.other)].into_iter().flatten() {
            let ends = (cuda.read(at, 1)?[0], cuda.read(at + last, 1)?[0]);
            let good = (self.value, self.value + self.words() - 1);
            ensure!(ends == good, "buffer {number} has {ends:?} at {at:#x} instead of {good:?}");
            let (start, bytes) = cuda.range(at + last)?;
            ensure!((start, bytes) == (at, self.bytes), "{at:#x} is in {bytes} bytes at {start:#x}");
            // Memory type, device, and the mapping's size and base. They do not depend on the memory's actual location.
            let said = cuda.attributes(&[2, 9, 18, 19], at + 8)?;
            ensure!(said == [2, 0, self.bytes, at], "the attributes of {at:#x} are {said:x?}");
            ensure!(cuda.attribute(20, at)? == self.block, "its memory has another number");
            let one = [2, 9, 19].map(|kind| cuda.attribute(kind, at));
            ensure!(one == [Ok(2), Ok(0), Ok(at)], "the attribute of {at:#x} is {one:x?}");
        }
        Ok(())
    }

    /// Maps the memory at its first address and sets the access permissions.
    fn map(&mut self, cuda: Cuda) -> Result<()> {
        cuda.map_at(self.at, self.bytes, 0, self.handle)?;
        cuda.allow(self.at, self.bytes, CARD, ALL)?;
        self.mapped = true;
        Ok(())
    }

    fn map_other(&mut self, cuda: Cuda) -> Result<()> {
        cuda.map_at(self.other, self.bytes, 0, self.handle)?;
        cuda.allow(self.other, self.bytes, CARD, if self.writes { ALL } else { 1 })?;
        Ok(())
    }
}

/// Runs kernels on buffers of several sizes, each mapped at two addresses, while mappings and handles are created and
/// released. Creates all handles with the allocation properties `property`. Returns a checksum.
pub fn work(cuda: Cuda, property: [i32; 8], mib: u64, rounds: u64, spin_us: u64) -> Result<String> {
    const SIZES: [u64; 4] = [2, 4, 6, 10];
    let (fill, add, sum, spin) =
        (cuda.kernel("fill")?, cuda.kernel("add")?, cuda.kernel("checksum")?, cuda.kernel("spin")?);
    let stream = cuda.stream()?;
    let result = cuda.alloc(4096)?;
    cuda.set(result, 0, 4096)?;
    let base = cuda.reserve(2 * mib * MIB)?;
    let (mut buffers, mut used) = (Vec::new(), 0);
    for bytes in SIZES.iter().cycle().map(|size| size * MIB) {
        if used + bytes > mib * MIB {
            break;
        }
        let (number, at) = (buffers.len() as u64, base + used);
        let other = at + mib * MIB;
        let writes = number % 3 != 1;
        let handle = cuda.create_of(property, bytes, 0)?;
        let mut buffer = Buffer { handle, bytes, at, other, writes, mapped: false, value: number, block: 0 };
        buffer.map(cuda)?;
        buffer.map_other(cuda)?;
        buffer.block = cuda.attribute(20, at)?;
        cuda.launch(fill, &[at, buffer.words(), number], stream)?;
        used += bytes;
        buffers.push(buffer);
    }
    cuda.finish(stream)?;
    // A graph stores addresses, so it uses memory that stays mapped.
    let stays = |n: usize| n.is_multiple_of(4);
    let graph = cuda.capture(stream, || {
        let mut all = buffers.iter().enumerate().filter(|(n, _)| stays(*n));
        all.try_for_each(|(_, buffer)| cuda.launch(add, &[buffer.at, buffer.words(), 5], stream))
    })?;
    for round in 0..rounds {
        for buffer in buffers.iter_mut().filter(|buffer| buffer.mapped || buffer.writes) {
            cuda.launch(add, &[buffer.place(round), buffer.words(), round], stream)?;
            buffer.value += round;
        }
        if round % 3 == 0 {
            cuda.graph(graph, stream)?;
            buffers.iter_mut().enumerate().filter(|(n, _)| stays(*n)).for_each(|(_, buffer)| buffer.value += 5);
        }
        if spin_us > 0 {
            cuda.launch(spin, &[spin_us, result], stream)?;
        }
        if round % 4 == 3 {
            cuda.finish(stream)?;
            let number = (round as usize / 4) % buffers.len();
            buffers[number].check(cuda, number)?;
            change(cuda, &mut buffers, number, round, fill, stream, stays(number))?;
        }
    }
    cuda.finish(stream)?;
    let mut total = 0u64;
    for (number, buffer) in buffers.iter_mut().enumerate() {
        if !buffer.mapped {
            buffer.map(cuda)?;
        }
        buffer.check(cuda, number)?;
        cuda.launch(sum, &[buffer.at, buffer.words(), result + 8], stream)?;
        cuda.finish(stream)?;
        total = total.rotate_left(7) ^ cuda.read(result + 8, 1)?[0];
        ensure!(cuda.reference(buffer.at + 9)? == buffer.handle, "another handle");
        ensure!(cuda.property(buffer.handle)?[..4] == property[..4], "another description");
        cuda.release(buffer.handle)?;
    }
    // Unmap all mappings of each half in one call.
    cuda.unmap_at(base, used)?;
    cuda.unmap_at(base + mib * MIB, used)?;
    for buffer in &buffers {
        cuda.release(buffer.handle)?;
    }
    cuda.unreserve(base, 2 * mib * MIB)?;
    Ok(format!("{total:016x}"))
}

/// Maps a buffer again, unmaps it, exports it, or replaces its handle.
fn change(
    cuda: Cuda,
    buffers: &mut [Buffer],
    number: usize,
    round: u64,
    fill: u64,
    stream: u64,
    stays: bool,
) -> Result<()> {
    let buffer = &mut buffers[number];
    if round % 16 == 11 && cuda.property(buffer.handle)?[1] != 0 {
        export(cuda, buffer)?;
        buffer.check(cuda, number)?;
    }
    if !buffer.mapped {
        buffer.map(cuda)?;
        return buffer.check(cuda, number);
    }
    cuda.unmap_at(buffer.at, buffer.bytes)?;
    buffer.mapped = false;
    if round % 8 == 3 && !stays {
        return Ok(());
    }
    cuda.unmap_at(buffer.other, buffer.bytes)?;
    // The memory is no longer mapped, so only its handle keeps it alive.
    if round % 8 == 7 {
        let old = buffer.handle;
        buffer.handle = cuda.create_of(cuda.property(old)?, buffer.bytes, 0)?;
        cuda.release(old)?;
        buffer.value = round;
    }
    buffer.map_other(cuda)?;
    buffer.map(cuda)?;
    if round % 8 == 7 {
        buffer.block = cuda.attribute(20, buffer.at)?;
        cuda.launch(fill, &[buffer.at, buffer.words(), round], stream)?;
        cuda.finish(stream)?;
    }
    buffer.check(cuda, number)
}

/// Exports a handle, and imports it again as another process would. Checks that both handles refer to the same memory.
fn export(cuda: Cuda, buffer: &mut Buffer) -> Result<()> {
    let imported = cuda.import(&cuda.export(buffer.handle)?)?;
    let at = cuda.map(imported, buffer.bytes)?;
    let last = 8 * (buffer.words() - 1);
    let ends = (cuda.read(at, 1)?[0], cuda.read(at + last, 1)?[0]);
    ensure!(ends == (buffer.value, buffer.value + buffer.words() - 1), "the exported memory has {ends:?}");
    let place = if buffer.mapped { buffer.at } else { buffer.other };
    cuda.write(at + 8, &[4711])?;
    ensure!(cuda.read(place + 8, 1)? == [4711], "data written to one mapping is missing in the other");
    cuda.write(at + 8, &[buffer.value + 1])?;
    cuda.unmap(at, buffer.bytes)?;
    cuda.release(imported)?;
    // Exporting the handle again has no effect.
    drop(cuda.export(buffer.handle)?);
    Ok(())
}

/// Creates a one-chunk handle in each of many threads concurrently, twice. Returns the number of successes in each
/// round.
pub fn burst(cuda: Cuda, threads: usize) -> Result<String> {
    let start = std::sync::Barrier::new(threads);
    let mut made = Vec::new();
    for _ in 0..2 {
        let handles: Vec<u64> = std::thread::scope(|scope| {
            let create = || {
                start.wait();
                cuda.create_own(2 << 20).ok()
            };
            let all: Vec<_> = (0..threads).map(|_| scope.spawn(create)).collect();
            all.into_iter().filter_map(|thread| thread.join().ok().flatten()).collect()
        });
        made.push(handles.len().to_string());
        for handle in handles {
            cuda.release(handle)?;
        }
    }
    Ok(made.join(" "))
}

/// Maps memory until a request fails, releases all of it, and does both again. Returns the amount mapped in each round,
/// in MiB.
pub fn fill(cuda: Cuda, step_mib: u64) -> Result<String> {
    let bytes = step_mib * MIB;
    let mut line = String::new();
    for _ in 0..2 {
        let mut all = Vec::new();
        let error = loop {
            match cuda.create_own(bytes) {
                Ok(handle) => {
                    let at = cuda.map(handle, bytes)?;
                    cuda.set(at, 1, bytes)?;
                    all.push((handle, at));
                }
                Err(error) => break error,
            }
            ensure!(all.len() < 1 << 16, "nothing refuses");
        };
        ensure!(error.code == 2, "{error}");
        write!(line, "{} ", all.len() as u64 * step_mib)?;
        for (handle, at) in all {
            cuda.release(handle)?;
            cuda.unmap(at, bytes)?;
        }
    }
    Ok(line.trim().to_owned())
}

/// Returns the results of invalid calls by name.
pub fn wrong(cuda: Cuda) -> Result<String> {
    const G: u64 = 2 * MIB;
    fn code<T>(result: Result<T, Failed>) -> i32 {
        result.err().map_or(0, |error| error.code)
    }
    let own = [1, 0, 1, 0, 0, 0, 0, 0];
    let elsewhere = [1, 0, 1, 9, 0, 0, 0, 0];
    let base = cuda.reserve(64 * G)?;
    let (four, two) = (cuda.create_own(4 * G)?, cuda.create_own(2 * G)?);
    let plain = cuda.alloc(8 * G)?;
    let mut all = vec![
        ("nothing", code(cuda.create_own(0))),
        ("odd", code(cuda.create_own(G / 2))),
        ("flags", code(cuda.create_of(own, G, 1))),
        ("no-such-card", code(cuda.create_of(elsewhere, G, 0))),
        ("map-part", code(cuda.map_at(base, 2 * G, 0, four))),
        ("map-offset", code(cuda.map_at(base, 2 * G, 2 * G, four))),
        ("map-nothing", code(cuda.map_at(base, 0, 0, four))),
        ("map-odd-address", code(cuda.map_at(base + 4096, 4 * G, 0, four))),
        ("map-unreserved", code(cuda.map_at(1 << 40, 4 * G, 0, four))),
        ("map", code(cuda.map_at(base, 4 * G, 0, four))),
        ("map-over", code(cuda.map_at(base + 2 * G, 2 * G, 0, two))),
        ("map-beside", code(cuda.map_at(base + 4 * G, 2 * G, 0, two))),
        ("map-over-plain", code(cuda.map_at(plain, 2 * G, 0, two))),
    ];
    ensure!(cuda.may(base)? == 0, "access without permission");
    all.extend([
        ("allow-part", code(cuda.allow(base, 2 * G, CARD, ALL))),
        ("allow-gap", code(cuda.allow(base, 8 * G, CARD, ALL))),
        ("allow-part-and-whole", code(cuda.allow(base + 2 * G, 4 * G, CARD, ALL))),
        ("allow-no-such-card", code(cuda.allow(base, 6 * G, Location { kind: 1, id: 9 }, ALL))),
        ("allow-host", code(cuda.allow(base, 6 * G, Location { kind: 2, id: 0 }, ALL))),
        ("allow-what", code(cuda.allow(base, 6 * G, CARD, 2))),
        ("allow-reading", code(cuda.allow(base, 6 * G, CARD, 1))),
    ]);
    ensure!(cuda.may(base + 5 * G)? == 1, "the read permission is missing");
    all.extend([
        ("allow", code(cuda.allow(base, 6 * G, CARD, ALL))),
        ("access-unmapped", code(cuda.may(base + 20 * G))),
        ("unmap-part", code(cuda.unmap_at(base, 2 * G))),
        ("unmap-part-and-whole", code(cuda.unmap_at(base + 2 * G, 4 * G))),
        ("unmap-nothing", code(cuda.unmap_at(base, 0))),
        ("unmap-plain", code(cuda.unmap_at(plain, 8 * G))),
        ("retain-unmapped", code(cuda.reference(base + 20 * G))),
        ("retain-plain", code(cuda.reference(plain))),
        ("free", code(cuda.free(base))),
        ("range-unmapped", code(cuda.range(base + 20 * G))),
        ("attribute-unmapped", code(cuda.attribute(2, base + 20 * G))),
        ("attribute-host-pointer", code(cuda.attribute(4, base))),
        ("export", code(cuda.export(four))),
        ("release", code(cuda.release(four))),
        ("release-again", code(cuda.release(four))),
        ("map-released", code(cuda.map_at(base + 20 * G, 4 * G, 0, four))),
    ]);
    // The memory stays alive while it is mapped.
    cuda.write(base + 3 * G, &[77])?;
    ensure!(cuda.read(base + 3 * G, 1)? == [77], "the written value");
    let range = [11, 12].map(|kind| cuda.attribute(kind, base + 5 * G));
    ensure!(range == [Ok(base), Ok(64 * G)], "the reported reservation is {range:x?}");
    ensure!(cuda.reference(base + 3 * G)? == four, "another handle");
    // Exportable memory comes from the driver; map it next to the library's memory.
    let shared = cuda.create(false, 2 * G)?;
    all.extend([
        ("map-shared", code(cuda.map_at(base + 6 * G, 2 * G, 0, shared))),
        ("allow-both", code(cuda.allow(base, 8 * G, CARD, ALL))),
        ("export-shared", code(cuda.export(shared))),
        ("retain-shared", i32::from(cuda.reference(base + 7 * G) != Ok(shared))),
        ("release-shared", code(cuda.release(shared).and_then(|()| cuda.release(shared)))),
    ]);
    cuda.write(base + 4 * G, &[1, 2, 3])?;
    cuda.copy(base + 6 * G, base + 4 * G, 24, 0)?;
    ensure!(cuda.read(base + 6 * G, 3)? == [1, 2, 3], "the copied value");
    all.extend([
        ("release-last", code(cuda.release(four))),
        ("unmap", code(cuda.unmap_at(base, 8 * G))),
        ("release-gone", code(cuda.release(four))),
        ("retain-gone", code(cuda.reference(base))),
        ("release-two", code(cuda.release(two))),
        ("unreserve", code(cuda.unreserve(base, 64 * G))),
    ]);
    let names: Vec<String> = all.iter().map(|(name, code)| format!("{name}={code}")).collect();
    Ok(names.join(" "))
}
