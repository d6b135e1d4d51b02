//! A minimal driver that uses nouveau's ioctls, as the baseline for the `gdev` library.
//!
//! [`Raw`] issues the ioctls as a program without a library would. It submits the same kernels and copies, and
//! allocates push buffers and two staging buffers as late and of the same sizes as the library. `Raw` lacks the
//! library's checks and stamps, so it does not detect lost work, and the caller must compare results. `Raw` uses only
//! the argument layouts, the method encoding and the file mapping of `gdev`.

use std::fs::{File, OpenOptions};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use gdev::mapping::Mapping;
use gdev::nouveau::device::{RING, call};
use gdev::nouveau::methods::{self, Area, Code};
use gdev::nouveau::push::{Engine, Object, PUSHBUFFER_BYTES, Push, linear};
use gdev::nouveau::{TUNING, uapi};
use gdev::{Grid, Image, Memory, Module, Params, Place};
use workloads::Gpu;

/// Maximum size of a staging buffer in bytes.
const STAGING_BYTES: u64 = TUNING.piece_bytes;
/// Minimum size of a staging buffer in bytes.
const MIN_STAGING_BYTES: u64 = 64 << 10;
/// Number of staging buffers. The CPU uses one while the card uses the other.
const STAGINGS: usize = 2;
/// Number of bytes that the card prefetches beyond the program counter.
const FETCH_AHEAD_BYTES: u64 = 0x100;

/// A buffer of the kernel driver.
#[derive(Debug)]
struct Buffer {
    handle: u32,
    domain: u32,
    address: u64,
    bytes: u64,
    /// CPU mapping of a buffer in RAM.
    mapping: Option<Mapping>,
}

impl Buffer {
    fn new(file: &File, domain: u32, bytes: u64) -> Result<Self> {
        let info = uapi::GemInfo {
            size: bytes,
            domain: domain | uapi::DOMAIN_MAPPABLE,
            tile_flags: uapi::TILE_NONCONTIG,
            ..Default::default()
        };
        let mut new = uapi::GemNew { info, ..Default::default() };
        call(file, &mut new).with_context(|| format!("{bytes} bytes"))?;
        let uapi::GemInfo { handle, size, offset: address, map_handle, .. } = new.info;
        let mapping = match domain {
            uapi::DOMAIN_GART => Some(Mapping::new(file, map_handle, usize::try_from(size)?)?),
            _ => None,
        };
        Ok(Self { handle, domain, address, bytes, mapping })
    }

    fn mapping(&self) -> Result<&Mapping> {
        self.mapping.as_ref().context("the buffer is not in RAM")
    }

    /// Returns an entry for the buffer list of a submission.
    fn entry(&self, reads: bool, writes: bool) -> uapi::PushbufBuffer {
        uapi::PushbufBuffer {
            handle: self.handle,
            read_domains: if reads { self.domain } else { 0 },
            write_domains: if writes { self.domain } else { 0 },
            valid_domains: self.domain,
            ..Default::default()
        }
    }
}

/// A staging buffer, with the number of the last submission that uses it.
#[derive(Debug)]
struct Staging {
    buffer: Buffer,
    busy_until: u64,
}

/// A program loaded onto the card.
#[derive(Debug)]
struct Loaded {
    code: Buffer,
    program: sm20::Program,
}

/// An open render node with a channel.
#[derive(Debug)]
pub struct Raw {
    channel: i32,
    multiprocessors: u32,
    pushbuffers: Vec<Buffer>,
    /// Number of submissions so far.
    submitted: u64,
    buffers: Vec<Option<Buffer>>,
    modules: Vec<Loaded>,
    stagings: Vec<Staging>,
    next_staging: usize,
    bank: Buffer,
    local: Option<Buffer>,
    /// The render node. Closing the file frees all handles.
    file: File,
}

impl Raw {
    /// Opens a nouveau render node, and creates a channel for copies and compute work.
    pub fn open(node: &Path) -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(node).context("the render node")?;
        let mut units = uapi::GetParam { param: uapi::param::GRAPH_UNITS, value: 0 };
        call(&file, &mut units)?;
        let multiprocessors = (units.value >> 8) as u32 & 0xff_ffff;
        let mut channel = uapi::ChannelAlloc::default();
        call(&file, &mut channel)?;
        let channel = channel.channel;
        let bank = Buffer::new(&file, uapi::DOMAIN_VRAM, u64::from(methods::BANK_BYTES))?;
        let mut push = Push::default();
        for object in [Engine::M2mf.object(), Object::COMPUTE] {
            let (handle, class) = (u32::from(object.class), i32::from(object.class));
            call(&file, &mut uapi::ObjectAlloc { channel, handle, class })?;
            push.bind(object);
        }
        methods::set_up(&mut push, multiprocessors, bank.address);
        let uses = [bank.entry(false, true)];
        let mut raw = Self {
            channel,
            multiprocessors,
            pushbuffers: Vec::new(),
            submitted: 0,
            buffers: Vec::new(),
            modules: Vec::new(),
            stagings: Vec::new(),
            next_staging: 0,
            bank,
            local: None,
            file,
        };
        raw.submit(&push, uses)?;
        Ok(raw)
    }

    fn buffer(&self, memory: Memory) -> Result<&Buffer> {
        self.buffers.get(memory.index).and_then(Option::as_ref).context("a freed buffer")
    }

    /// Waits until the card no longer uses the push buffer of a submission. Submissions are counted from 1.
    fn wait(&self, submission: u64) -> Result<()> {
        if submission == 0 || submission + RING as u64 <= self.submitted {
            return Ok(());
        }
        let handle = self.pushbuffers[((submission - 1) % RING as u64) as usize].handle;
        call(&self.file, &mut uapi::GemCpuPrep { handle, flags: uapi::CPU_PREP_WRITE })?;
        Ok(call(&self.file, &mut uapi::GemCpuFini { handle })?)
    }

    /// Submits a push buffer. Returns the submission's number, counted from 1.
    fn submit(&mut self, push: &Push, uses: impl IntoIterator<Item = uapi::PushbufBuffer>) -> Result<u64> {
        let submission = self.submitted + 1;
        // An earlier submission may still use the same push buffer.
        self.wait(submission.saturating_sub(RING as u64))?;
        let slot = (self.submitted % RING as u64) as usize;
        if slot == self.pushbuffers.len() {
            self.pushbuffers.push(Buffer::new(&self.file, uapi::DOMAIN_GART, PUSHBUFFER_BYTES)?);
        }
        let buffer = &self.pushbuffers[slot];
        let bytes: Vec<u8> = push.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        buffer.mapping()?.write(0, &bytes);
        let mut list = vec![buffer.entry(true, false)];
        for used in uses {
            // The list must contain each buffer only once.
            match list.iter_mut().find(|entry| entry.handle == used.handle) {
                Some(entry) => {
                    entry.read_domains |= used.read_domains;
                    entry.write_domains |= used.write_domains;
                }
                None => list.push(used),
            }
        }
        let mut pieces = [uapi::PushbufPush { length: bytes.len() as u64, ..Default::default() }];
        let mut pushbuf = uapi::GemPushbuf {
            channel: self.channel.cast_unsigned(),
            nr_buffers: list.len() as u32,
            buffers: list.as_mut_ptr().expose_provenance() as u64,
            nr_push: 1,
            push: pieces.as_mut_ptr().expose_provenance() as u64,
            ..Default::default()
        };
        // Both lists are valid until the call returns.
        call(&self.file, &mut pushbuf)?;
        self.submitted = submission;
        Ok(submission)
    }

    /// Submits an M2MF copy that waits for all earlier grids.
    fn submit_copy(
        &mut self,
        from: (u64, uapi::PushbufBuffer),
        to: (u64, uapi::PushbufBuffer),
        bytes: u64,
    ) -> Result<u64> {
        let mut push = Push::default();
        methods::wait_for_idle(&mut push);
        for rect in &linear(from.0, to.0, bytes, Engine::M2mf.most_lines()) {
            if !push.has_room() {
                self.submit(&std::mem::take(&mut push), [from.1.clone(), to.1.clone()])?;
            }
            push.copy(Engine::M2mf, rect);
        }
        self.submit(&push, [from.1, to.1])
    }

    /// Returns the index of a staging buffer of at least `bytes` bytes that the card no longer uses.
    fn take_staging(&mut self, bytes: usize) -> Result<usize> {
        let slot = self.next_staging.min(self.stagings.len());
        self.next_staging = (slot + 1) % STAGINGS;
        if let Some(staging) = self.stagings.get(slot) {
            self.wait(staging.busy_until)?;
            if staging.buffer.bytes >= bytes as u64 {
                return Ok(slot);
            }
        }
        let size = (bytes as u64).next_power_of_two().clamp(MIN_STAGING_BYTES, STAGING_BYTES);
        let staging = Staging { buffer: Buffer::new(&self.file, uapi::DOMAIN_GART, size)?, busy_until: 0 };
        match self.stagings.get_mut(slot) {
            Some(known) => {
                let old = std::mem::replace(known, staging);
                self.close(old.buffer)?;
            }
            None => self.stagings.push(staging),
        }
        Ok(slot)
    }

    /// Copies `bytes` to `address` in the VRAM buffer that `entry` describes.
    fn write_vram(&mut self, address: u64, entry: &uapi::PushbufBuffer, bytes: &[u8]) -> Result<()> {
        for (at, piece) in (address..).step_by(STAGING_BYTES as usize).zip(bytes.chunks(STAGING_BYTES as usize)) {
            let slot = self.take_staging(piece.len())?;
            let staging = &self.stagings[slot].buffer;
            staging.mapping()?.write(0, piece);
            let from = (staging.address, staging.entry(true, false));
            self.stagings[slot].busy_until = self.submit_copy(from, (at, entry.clone()), piece.len() as u64)?;
        }
        Ok(())
    }

    /// Waits for the copy to a staging buffer, and reads the buffer.
    fn read_staging(&self, slot: usize, bytes: &mut [u8]) -> Result<()> {
        let Staging { buffer, busy_until } = &self.stagings[slot];
        self.wait(*busy_until)?;
        buffer.mapping()?.read(0, bytes);
        Ok(())
    }

    /// Ensures that there are at least `bytes` bytes of local memory per thread.
    fn provide_local(&mut self, bytes: u32) -> Result<()> {
        let wanted = methods::local_area(u64::from(self.multiprocessors), bytes);
        if self.local.as_ref().is_some_and(|local| local.bytes >= wanted) {
            return Ok(());
        }
        let local = Buffer::new(&self.file, uapi::DOMAIN_VRAM, wanted)?;
        let mut push = Push::default();
        methods::wait_for_idle(&mut push);
        methods::set_local(&mut push, Area { address: local.address, bytes: local.bytes });
        self.submit(&push, [local.entry(false, true)])?;
        if let Some(old) = self.local.replace(local) {
            self.close(old)?;
        }
        Ok(())
    }

    /// Frees a buffer. The kernel driver keeps its memory until submitted work has completed.
    fn close(&self, buffer: Buffer) -> Result<()> {
        let Buffer { handle, mapping, .. } = buffer;
        drop(mapping);
        Ok(call(&self.file, &mut uapi::GemClose { handle, pad: 0 })?)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // The kernel driver waits for the channel's work. A failure cannot be handled here.
        let _ = call(&self.file, &mut uapi::ChannelFree { channel: self.channel });
    }
}

/// Checks that a range is within a buffer.
fn inside(memory: Memory, at: u64, bytes: usize) -> Result<()> {
    let end = at.checked_add(bytes as u64);
    ensure!(end.is_some_and(|end| end <= memory.bytes), "{bytes} bytes at {at:#x} of {} bytes", memory.bytes);
    Ok(())
}

impl Gpu for Raw {
    fn allocate(&mut self, place: Place, bytes: u64) -> Result<Memory> {
        let domain = if place == Place::Vram { uapi::DOMAIN_VRAM } else { uapi::DOMAIN_GART };
        let buffer = Buffer::new(&self.file, domain, bytes.max(1))?;
        let memory = Memory { index: self.buffers.len(), address: buffer.address, bytes };
        self.buffers.push(Some(buffer));
        Ok(memory)
    }

    fn free(&mut self, memory: Memory) -> Result<()> {
        let slot = self.buffers.get_mut(memory.index).and_then(Option::take);
        self.close(slot.context("a freed buffer")?)
    }

    fn upload(&mut self, memory: Memory, at: u64, bytes: &[u8]) -> Result<()> {
        inside(memory, at, bytes.len())?;
        if let Some(mapping) = &self.buffer(memory)?.mapping {
            self.wait(self.submitted)?;
            mapping.write(usize::try_from(at)?, bytes);
            return Ok(());
        }
        let entry = self.buffer(memory)?.entry(false, true);
        self.write_vram(memory.address + at, &entry, bytes)
    }

    fn download(&mut self, memory: Memory, at: u64, bytes: &mut [u8]) -> Result<()> {
        inside(memory, at, bytes.len())?;
        if let Some(mapping) = &self.buffer(memory)?.mapping {
            self.wait(self.submitted)?;
            mapping.read(usize::try_from(at)?, bytes);
            return Ok(());
        }
        let entry = self.buffer(memory)?.entry(true, false);
        // Chunk that the card is copying to a staging buffer.
        let mut under_way: Option<(usize, &mut [u8])> = None;
        let pieces = (memory.address + at..).step_by(STAGING_BYTES as usize);
        for (at, piece) in pieces.zip(bytes.chunks_mut(STAGING_BYTES as usize)) {
            let slot = self.take_staging(piece.len())?;
            let staging = &self.stagings[slot].buffer;
            let to = (staging.address, staging.entry(false, true));
            self.stagings[slot].busy_until = self.submit_copy((at, entry.clone()), to, piece.len() as u64)?;
            if let Some((slot, piece)) = under_way.replace((slot, piece)) {
                self.read_staging(slot, piece)?;
            }
        }
        under_way.map_or(Ok(()), |(slot, piece)| self.read_staging(slot, piece))
    }

    fn copy(&mut self, from: Memory, to: Memory, bytes: u64) -> Result<()> {
        let length = usize::try_from(bytes)?;
        inside(from, 0, length)?;
        inside(to, 0, length)?;
        let (source, target) = (self.buffer(from)?.entry(true, false), self.buffer(to)?.entry(false, true));
        self.submit_copy((from.address, source), (to.address, target), bytes).map(drop)
    }

    fn load(&mut self, program: &sm20::Program) -> Result<Module> {
        let program = methods::program(Image::Sm20(program), "nouveau")?;
        self.provide_local(program.kernels.iter().map(|kernel| kernel.local_bytes).max().unwrap_or(0))?;
        let bytes = program.bytes();
        let code = Buffer::new(&self.file, uapi::DOMAIN_VRAM, bytes.len() as u64 + FETCH_AHEAD_BYTES)?;
        self.write_vram(code.address, &code.entry(false, true), &bytes)?;
        self.modules.push(Loaded { code, program: program.clone() });
        Ok(Module { index: self.modules.len() - 1 })
    }

    fn launch(&mut self, module: Module, name: &str, grid: Grid, params: &Params, uses: &[Memory]) -> Result<()> {
        let Loaded { code, program } = self.modules.get(module.index).context("an unknown module")?;
        let kernel = methods::kernel(program, name, grid, params)?;
        let mut list = vec![code.entry(true, false), self.bank.entry(false, true)];
        list.extend(self.local.iter().map(|local| local.entry(false, true)));
        for used in uses {
            list.push(self.buffer(*used)?.entry(true, true));
        }
        let mut push = Push::default();
        methods::launch(&mut push, Code { address: code.address, kernel }, grid, params, self.bank.address);
        // The next grid may read the results of this grid.
        methods::wait_for_idle(&mut push);
        self.submit(&push, list).map(drop)
    }

    fn finish(&mut self) -> Result<()> {
        self.wait(self.submitted)
    }
}
