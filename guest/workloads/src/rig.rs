//! Common code of the tests: the device, counters, and functions that fill and check buffers in any memory.
//!
//! The CPU fills and checks guest RAM. CPU accesses to BAR1 may trap, so more than a few KiB of VRAM are transferred
//! with a GPU copy through a bounce buffer, on an engine other than the one under test if possible. A few words of
//! buffers of up to 16 MiB are still sampled through BAR1.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail, ensure};

use crate::pattern::{Expected, Piece, Random, Stream};
use gdev::nouveau::device::{Buffer, Channel, Device, Domain, Use};
use gdev::nouveau::push::{Engine, Push, Rect, linear, lines};
use gdev::nouveau::uapi::param;

/// Maximum size of VRAM buffers that are filled and checked only through BAR1, in bytes.
const DIRECT: u64 = 2048;
/// Maximum size of a buffer mapped through BAR1, in bytes.
pub const MOST_MAPPED: u64 = 16 << 20;
/// Number of 64-bit words sampled through BAR1 in a VRAM buffer that is checked with GPU copies.
const SAMPLED_WORDS: u64 = 24;
/// Size of the bounce buffer, in bytes.
const BOUNCE: u64 = 2 << 20;
/// Number of bytes that the CPU generates or compares at a time.
const CHUNK: u64 = 64 << 10;

/// The device, with its usage counters.
pub struct Rig {
    device: Arc<Device>,
    random: Cell<u64>,
    seed: u64,
    verified: Cell<u64>,
    copies: Cell<u64>,
    channels: Cell<u64>,
    began: Instant,
}

/// Counts of a [`Rig`] at a point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Number of bytes compared with expected bytes.
    pub bytes: u64,
    /// Number of copies launched on the GPU.
    pub copies: u64,
    /// Number of channels created.
    pub channels: u64,
}

impl Rig {
    /// Opens the device. `seed` determines all test data and choices.
    pub fn open(node: &Path, seed: u64) -> Result<Self> {
        Ok(Self {
            device: Device::open(node)?,
            random: Cell::new(seed),
            seed,
            verified: Cell::new(0),
            copies: Cell::new(0),
            channels: Cell::new(0),
            began: Instant::now(),
        })
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the seed of the data.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the time since the device was opened, in seconds.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Returns a new source of random choices, independent of earlier ones.
    pub fn random(&self) -> Random {
        let mut random = Random(self.random.get());
        let next = random.next();
        self.random.set(random.0);
        Random(next)
    }

    /// Returns the current counts.
    pub fn counts(&self) -> Counts {
        Counts { bytes: self.verified.get(), copies: self.copies.get(), channels: self.channels.get() }
    }

    /// Adds counts of the test's work outside this rig: of its contexts, other rigs or other processes.
    pub fn add(&self, counts: Counts) {
        self.verified.set(self.verified.get() + counts.bytes);
        self.copies.set(self.copies.get() + counts.copies);
        self.channels.set(self.channels.get() + counts.channels);
    }

    /// Returns the VRAM available for buffers, in bytes.
    pub fn vram(&self) -> Result<u64> {
        Ok(self.device.parameter(param::FB_SIZE)?)
    }

    /// Allocates a buffer of at least `size` bytes.
    pub fn buffer(&self, domain: Domain, size: u64) -> Result<Buffer> {
        Ok(Buffer::new(&self.device, domain, size)?)
    }

    /// Creates a channel with the objects of all `engines`.
    pub fn channel(&self, engines: &[Engine]) -> Result<Channel> {
        let channel = Channel::new(&self.device)?;
        self.add(Counts { channels: 1, ..Counts::default() });
        for engine in engines {
            channel.add(engine.object())?;
        }
        Ok(channel)
    }

    /// Creates a channel with M2MF, which is required, and every copy engine of the card.
    pub fn full_channel(&self) -> Result<(Channel, Vec<Engine>)> {
        let channel = self.channel(&[Engine::M2mf])?;
        let mut engines = vec![Engine::M2mf];
        for engine in [Engine::Ce0, Engine::Ce1] {
            match channel.add(engine.object()) {
                Ok(()) => engines.push(engine),
                Err(error) => println!("no {}: {error:#}", engine.name()),
            }
        }
        Ok((channel, engines))
    }

    /// Submits the copies in as many submissions as necessary, without waiting for them.
    pub fn launch(&self, channel: &Channel, engine: Engine, rects: &[Rect], uses: &[Use<'_>]) -> Result<()> {
        let mut push = Push::default();
        for rect in rects {
            if !push.has_room() {
                channel.submit(&std::mem::take(&mut push), uses)?;
            }
            push.copy(engine, rect);
        }
        self.add(Counts { copies: rects.len() as u64, ..Counts::default() });
        channel.submit(&push, uses)?;
        Ok(())
    }

    /// Counts bytes that a test itself has compared.
    pub fn verified(&self, bytes: u64) {
        self.add(Counts { bytes, ..Counts::default() });
    }

    /// Prints a progress line for a long test.
    pub fn progress(&self, name: &str) {
        let Counts { bytes, copies, channels } = self.counts();
        let seconds = self.seconds();
        println!("PROGRESS name={name} seconds={seconds:.1} bytes={bytes} copies={copies} channels={channels}");
    }
}

/// Fills and checks buffers for a test, on its own channel.
pub struct Helper<'a> {
    rig: &'a Rig,
    channel: Channel,
    engine: Engine,
    bounce: Buffer,
}

impl<'a> Helper<'a> {
    /// Creates a helper whose GPU copies run on `engine`.
    pub fn new(rig: &'a Rig, engine: Engine) -> Result<Self> {
        let (channel, bounce) = (rig.channel(&[engine])?, rig.buffer(Domain::Gart, BOUNCE)?);
        Ok(Self { rig, channel, engine, bounce })
    }

    /// Fills the whole buffer with the expected contents.
    pub fn fill(&self, buffer: &Buffer, expected: &Expected) -> Result<()> {
        if buffer.size() <= DIRECT || buffer.place()? == Domain::Gart {
            buffer.wait(true)?;
            return write_expected(buffer, 0, buffer.size(), 0, expected);
        }
        let mut at = 0;
        while at < buffer.size() {
            let length = (buffer.size() - at).min(BOUNCE);
            self.bounce.wait(true)?;
            write_expected(&self.bounce, 0, length, at, expected)?;
            let rects = linear(self.bounce.address(), buffer.address() + at, length, self.engine.most_lines());
            self.rig.launch(&self.channel, self.engine, &rects, &[Use::read(&self.bounce), stay(buffer, true)?])?;
            at += length;
        }
        Ok(buffer.wait(false)?)
    }

    /// Checks every byte of the buffer.
    pub fn check(&self, what: &str, buffer: &Buffer, expected: &Expected) -> Result<()> {
        buffer.wait(false)?;
        if buffer.size() <= DIRECT || buffer.place()? == Domain::Gart {
            check_expected(what, buffer, buffer.size(), 0, expected)?;
        } else {
            let mut at = 0;
            while at < buffer.size() {
                let length = (buffer.size() - at).min(BOUNCE);
                let rects = linear(buffer.address() + at, self.bounce.address(), length, self.engine.most_lines());
                let uses = [stay(buffer, false)?, Use::write(&self.bounce)];
                self.rig.launch(&self.channel, self.engine, &rects, &uses)?;
                self.bounce.wait(false)?;
                check_expected(what, &self.bounce, length, at, expected)?;
                at += length;
            }
            if buffer.size() <= MOST_MAPPED {
                self.sample(what, buffer, expected)?;
            }
        }
        self.rig.verified(buffer.size());
        Ok(())
    }

    /// Checks a sample of words through BAR1.
    fn sample(&self, what: &str, buffer: &Buffer, expected: &Expected) -> Result<()> {
        let mut random = self.rig.random();
        let last = buffer.size() - 8;
        for sample in 0..SAMPLED_WORDS {
            let at = match sample {
                0 => 0,
                1 => last,
                _ => random.below(last / 8) * 8,
            };
            let mut word = [0; 8];
            buffer.map()?.read(at as usize, &mut word);
            expected.check(&format!("{what} through BAR1"), at, &word)?;
        }
        Ok(())
    }
}

/// Returns a GPU use of the buffer that leaves the buffer in its current memory domain.
fn stay(buffer: &Buffer, writes: bool) -> Result<Use<'_>> {
    let used = if writes { Use::write(buffer) } else { Use::read(buffer) };
    Ok(used.at(buffer.place()?))
}

/// Writes `length` expected bytes starting at offset `from` to offset `at` of the buffer, using the CPU.
fn write_expected(buffer: &Buffer, at: u64, length: u64, from: u64, expected: &Expected) -> Result<()> {
    let mut chunk = vec![0; CHUNK.min(length) as usize];
    let mut done = 0;
    while done < length {
        let piece = &mut chunk[..(length - done).min(CHUNK) as usize];
        expected.fill(from + done, piece);
        buffer.map()?.write((at + done) as usize, piece);
        done += piece.len() as u64;
    }
    Ok(())
}

/// Compares the buffer's first `length` bytes with the expected bytes starting at offset `from`, using the CPU.
fn check_expected(what: &str, buffer: &Buffer, length: u64, from: u64, expected: &Expected) -> Result<()> {
    let mut chunk = vec![0; CHUNK.min(length) as usize];
    let mut done = 0;
    while done < length {
        let piece = &mut chunk[..(length - done).min(CHUNK) as usize];
        buffer.map()?.read(done as usize, piece);
        expected.check(what, from + done, piece)?;
        done += piece.len() as u64;
    }
    Ok(())
}

/// Applies to `target` the effect of the copies from a source buffer that contains `stream`.
pub fn expect_copy(target: &mut Expected, rects: &[Rect], source: &Buffer, stream: Stream, at: &Buffer) {
    for rect in rects {
        if rect.source_pitch == rect.line_bytes && rect.target_pitch == rect.line_bytes {
            target.put(Piece {
                at: rect.target - at.address(),
                length: u64::from(rect.line_bytes) * u64::from(rect.lines),
                stream,
                from: rect.source - source.address(),
            });
            continue;
        }
        for (to, from) in lines(rect) {
            target.put(Piece {
                at: to.start - at.address(),
                length: to.end - to.start,
                stream,
                from: from.start - source.address(),
            });
        }
    }
}

/// Rejects empty copies and copies outside their buffers, which would be bugs in this program.
pub fn ensure_inside(rects: &[Rect], source: &Buffer, target: &Buffer) -> Result<()> {
    for rect in rects {
        if rect.lines == 0 || rect.line_bytes == 0 {
            bail!("an empty rect: {rect:x?}");
        }
        for (buffer, start, pitch) in
            [(source, rect.source, rect.source_pitch), (target, rect.target, rect.target_pitch)]
        {
            let end = start + u64::from(rect.lines - 1) * u64::from(pitch) + u64::from(rect.line_bytes);
            let inside = start >= buffer.address() && end <= buffer.address() + buffer.size();
            ensure!(inside, "{rect:x?} leaves its buffer");
        }
    }
    Ok(())
}
