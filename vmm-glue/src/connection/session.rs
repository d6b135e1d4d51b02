//! Executes a client's messages, except for region accesses (`regions`) and migration requests (`migration`).

use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::migration::Migrating;
use super::share::ShareCheck;
use super::version::{Peer, negotiate};
use super::{Fatal, Message, Outbox};
use crate::counters::{add, add_len, worth_logging};
use crate::device::{Deferred, Device, NUM_REGIONS, RegionIndex, RegionInfo};
use crate::interrupts::NUM_IRQ_TYPES;
use crate::link::{ClientInfo, Link};
use crate::mappable::MmapArea;
use crate::protocol::{
    CAP_SPARSE_MMAP, Command, DEVICE_PCI, DEVICE_RESETTABLE, DMA_MAP_READ, DMA_MAP_WRITE, DMA_UNMAP_ALL, DeviceInfo,
    DmaMap, DmaUnmap, Header, IRQ_ACTION_MASK, IRQ_ACTION_UNMASK, IRQ_DATA_EVENTFD, IrqInfo, IrqSet, REGION_CAPS,
    REGION_MMAP, REGION_READ, REGION_WRITE, RegionInfoBody, SparseArea, SparseMmapCap, Version,
};
use crate::protocol::{DMA_UNMAP_GET_DIRTY_BITMAP, FLAG_TYPE_MASK};
use vmm_memory::memory::{AddError, AddRegion, MemoryLimits, PAGE_SIZE, withdrawals};

/// Reason for rejecting a request, with one part for the client and one for the log.
#[derive(Debug)]
pub(super) struct Refusal {
    pub errno: Errno,
    pub reason: String,
}

pub(super) fn refuse<T>(errno: Errno, reason: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { errno, reason: reason.into() })
}

#[derive(Debug)]
pub(super) struct Session {
    pub link: Link,
    pub(super) limits: MemoryLimits,
    pub max_transfer: usize,
    pub(super) client: ClientInfo,
    pub peer: Option<Peer>,
    pub regions: [RegionInfo; NUM_REGIONS],
    pub(super) share: ShareCheck,
    /// Number of this process's withdrawals that have been checked.
    pub(super) withdrawals: usize,
    /// Number of this client's rejected requests, which determines whether the next one is logged.
    pub(super) refused: u64,
    /// Set when the client's negotiation, memory or interrupts have changed. Cleared when the change is recorded in the
    /// journal.
    pub(super) changed: bool,
    /// Set when PCI configuration space may have changed. Cleared when the journal has checked it.
    pub(super) configured: bool,
    /// Migration state of the device.
    pub(super) migration: Migrating,
    /// The part of the last write that the device performs after the reply.
    pub(super) deferred: Option<Deferred>,
}

impl Session {
    pub fn new(link: Link, limits: MemoryLimits, max_transfer: usize, client: ClientInfo) -> Self {
        Self {
            link,
            limits,
            max_transfer,
            client,
            peer: None,
            regions: Default::default(),
            share: ShareCheck::default(),
            withdrawals: withdrawals(),
            refused: 0,
            changed: false,
            configured: false,
            migration: Migrating::default(),
            deferred: None,
        }
    }

    /// Completes the deferred write, if any. Must be called before any other call to the device.
    pub fn complete_deferred(&mut self, device: &mut dyn Device) {
        if let Some(deferred) = self.deferred.take() {
            device.complete(deferred);
        }
    }

    pub fn is_negotiated(&self) -> bool {
        self.peer.is_some()
    }

    /// Resumes a client that negotiated with another process, or before it was suspended.
    pub fn resume(&mut self, device: &dyn Device) {
        let Some(peer) = self.peer else { return };
        self.regions = device.regions();
        self.link.dma().connect(if peer.complete { peer.max_transfer } else { 0 });
        self.link.set_client(Some(self.client));
        self.gauge_memory();
    }

    pub fn count_received(&self, len: usize, stray: usize) {
        let counters = self.link.counters();
        add(&counters.receives, 1);
        add_len(&counters.bytes_in, len);
        add_len(&counters.stray_fds, stray);
    }

    /// Executes one message.
    pub fn handle(&mut self, device: &mut dyn Device, message: Message<'_>, out: &mut Outbox) -> Result<(), Fatal> {
        self.complete_deferred(device);
        let Message { header, body, .. } = message;
        if header.is_reply() {
            if !self.link.dma().reply(&header, body) {
                self.log(&header, "a reply without a request");
                add(&self.link.counters().errors, 1);
            }
            return Ok(());
        }
        self.link.counters().count_message(header.command());
        if header.no_reply() {
            add(&self.link.counters().posted, 1);
        }
        if self.peer.is_none() {
            return self.negotiate(device, message, out);
        }
        if let Err(refusal) = self.dispatch(device, message, out) {
            self.refuse(&header, body, refusal, out);
        }
        Ok(())
    }

    fn dispatch(&mut self, device: &mut dyn Device, message: Message<'_>, out: &mut Outbox) -> Result<(), Refusal> {
        let Message { header, body, fds, truncated, oversized } = message;
        let command = header.command();
        if !header.is_request() {
            return refuse(
                Errno::INVAL,
                format!("message type {} is neither a request nor a reply", header.flags & FLAG_TYPE_MASK),
            );
        }
        if oversized {
            let reason =
                format!("a message of {} bytes; the maximum is {} bytes of data", header.size, self.max_transfer);
            return refuse(Errno::TOOBIG, reason);
        }
        if truncated {
            return refuse(
                Errno::MFILE,
                "file descriptors were lost: the client sent too many, or this process has too many open files",
            );
        }
        if !fds.is_empty() && command != Command::DMA_MAP && command != Command::DEVICE_SET_IRQS {
            add_len(&self.link.counters().stray_fds, fds.len());
            return refuse(
                Errno::INVAL,
                format!("the client sent {} file descriptors with a message that must not carry any", fds.len()),
            );
        }
        match command {
            Command::REGION_WRITE => return self.region_write(device, &header, body, out),
            Command::REGION_READ => return self.region_read(device, &header, body, out),
            Command::REGION_WRITE_MULTI => return self.region_write_multi(device, &header, body, out),
            Command::DMA_MAP => {
                self.changed = true;
                self.dma_map(device, parse(body)?, fds)?;
            }
            Command::DMA_UNMAP => {
                self.changed = true;
                let request = parse(body)?;
                let size = self.dma_unmap(device, request)?;
                return reply(&header, &DmaUnmap { size, ..request }, out);
            }
            Command::DEVICE_GET_INFO => {
                parse::<DeviceInfo>(body)?;
                let info = DeviceInfo {
                    argsz: wire_len(size_of::<DeviceInfo>()),
                    flags: DEVICE_PCI | DEVICE_RESETTABLE,
                    num_regions: wire_len(NUM_REGIONS),
                    num_irqs: wire_len(NUM_IRQ_TYPES),
                };
                return reply(&header, &info, out);
            }
            Command::DEVICE_GET_REGION_INFO => return self.region_info(&header, parse(body)?, out),
            Command::DEVICE_GET_IRQ_INFO => {
                let request: IrqInfo = parse(body)?;
                let Some((flags, count)) = self.link.interrupts().info(request.index) else {
                    return refuse(Errno::INVAL, format!("interrupt type {} does not exist", request.index));
                };
                let info = IrqInfo { argsz: wire_len(size_of::<IrqInfo>()), flags, index: request.index, count };
                return reply(&header, &info, out);
            }
            Command::DEVICE_SET_IRQS => {
                let (request, booleans) =
                    IrqSet::read_from_prefix(body).map_err(|_| too_short(body, size_of::<IrqSet>()))?;
                // The journal does not store masks. No interrupt is raised after a restart, so none is masked.
                self.changed |=
                    request.flags & (IRQ_ACTION_MASK | IRQ_ACTION_UNMASK) == 0 || request.flags & IRQ_DATA_EVENTFD != 0;
                if let Err(error) = self.link.interrupts().set(&request, booleans, fds) {
                    return refuse(Errno::INVAL, error.to_string());
                }
            }
            Command::DEVICE_RESET => {
                self.link.interrupts().clear_pending();
                device.reset();
                self.migration.was_reset();
                self.configured = true;
            }
            Command::VERSION => return refuse(Errno::INVAL, "the version has already been negotiated"),
            Command::DEVICE_FEATURE => return self.feature(device, &header, body, out),
            Command::MIG_DATA_READ => return self.migration_read(device, &header, body, out),
            Command::MIG_DATA_WRITE => self.migration_write(device, body)?,
            Command::DIRTY_PAGES => {
                return refuse(Errno::NOTSUP, "dirty pages are only reported through device features");
            }
            Command::DEVICE_GET_REGION_IO_FDS => return refuse(Errno::NOTSUP, "regions have no I/O file descriptors"),
            Command::DMA_READ | Command::DMA_WRITE => {
                return refuse(Errno::INVAL, "only the server sends this command");
            }
            _ => return refuse(Errno::NOSYS, "unknown command"),
        }
        reply(&header, &(), out)
    }

    fn negotiate(&mut self, device: &mut dyn Device, message: Message<'_>, out: &mut Outbox) -> Result<(), Fatal> {
        let Message { header, body, fds, .. } = message;
        add_len(&self.link.counters().stray_fds, fds.len());
        if header.command() != Command::VERSION {
            out.error(&header, errno_number(Errno::INVAL), &[]);
            return Err(Fatal::NotNegotiated(header.command()));
        }
        match negotiate(body, self.max_transfer, self.limits.regions) {
            Ok((peer, text)) => {
                let ClientInfo { pid, uid, .. } = self.client;
                tracing::info!(pid, uid, minor = peer.minor, complete = peer.complete, "VMM connected");
                out.reply(&header, &Version { major: 0, minor: peer.minor }, &text);
                self.peer = Some(peer);
                (self.changed, self.configured) = (true, true);
                self.regions = device.regions();
                add(&self.link.counters().clients, 1);
                self.link.dma().connect(if peer.complete { peer.max_transfer } else { 0 });
                self.link.set_client(Some(self.client));
                device.connected();
                Ok(())
            }
            Err(reason) => {
                out.error(&header, errno_number(Errno::INVAL), &[]);
                Err(Fatal::Version(reason))
            }
        }
    }

    fn dma_map(
        &mut self,
        device: &mut dyn Device,
        request: DmaMap,
        fds: Vec<std::os::fd::OwnedFd>,
    ) -> Result<(), Refusal> {
        let DmaMap { argsz: _, flags, offset, address: gpa, size } = request;
        let stray = fds.len().saturating_sub(1);
        if stray != 0 {
            add_len(&self.link.counters().stray_fds, stray);
            return refuse(Errno::INVAL, format!("{} file descriptors for one memory region", fds.len()));
        }
        if flags & !(DMA_MAP_READ | DMA_MAP_WRITE) != 0 || flags == 0 {
            return refuse(
                Errno::INVAL,
                format!("flags {flags:#x} of a memory region; 1 (read), 2 (write) or 3 are known"),
            );
        }
        let add_region = AddRegion {
            gpa,
            size,
            offset: if fds.is_empty() { 0 } else { offset },
            readable: flags & DMA_MAP_READ != 0,
            writable: flags & DMA_MAP_WRITE != 0,
            fd: fds.into_iter().next(),
        };
        let memory = self.link.memory();
        let region = memory.add(add_region, &self.limits, self.link.wake()).map_err(|error| {
            let errno = match error {
                AddError::Overlap { .. } => Errno::EXIST,
                AddError::TooMany(_) | AddError::TooManyFiles(_) | AddError::TooMuch { .. } => Errno::NOSPC,
                _ => Errno::INVAL,
            };
            Refusal { errno, reason: format!("memory at {gpa:#x} of {size:#x} bytes: {}", chain(&error)) }
        })?;
        if let Err(error) = device.dma_map(&region) {
            memory.remove(gpa);
            return refuse(Errno::INVAL, format!("memory at {gpa:#x} of {size:#x} bytes: {error}"));
        }
        self.gauge_memory();
        Ok(())
    }

    /// Executes a `DMA_UNMAP` request with the semantics of VFIO's type 1 (version 2): removes only whole regions,
    /// never splits a region, and accepts a range without mappings. Returns the number of unmapped bytes.
    fn dma_unmap(&mut self, device: &mut dyn Device, request: DmaUnmap) -> Result<u64, Refusal> {
        let DmaUnmap { argsz: _, flags, address: gpa, size } = request;
        if flags & DMA_UNMAP_GET_DIRTY_BITMAP != 0 {
            return refuse(Errno::NOTSUP, "dirty page tracking is not supported");
        }
        if flags == DMA_UNMAP_ALL {
            if gpa != 0 || size != 0 {
                return refuse(Errno::INVAL, "unmapping all memory requires address 0 and size 0");
            }
            return Ok(self.unmap_range(device, 0, u64::MAX));
        }
        if flags != 0 {
            return refuse(Errno::INVAL, format!("unknown flags {flags:#x}"));
        }
        // Use the last byte of the range, because its end may overflow.
        let Some(last) = size.checked_sub(1).and_then(|rest| gpa.checked_add(rest)) else {
            return refuse(Errno::INVAL, format!("invalid range at {gpa:#x} of {size:#x} bytes"));
        };
        if !gpa.is_multiple_of(PAGE_SIZE) || !size.is_multiple_of(PAGE_SIZE) {
            let reason = format!("address {gpa:#x} and size {size:#x} must be multiples of {PAGE_SIZE}");
            return refuse(Errno::INVAL, reason);
        }
        let table = self.link.memory().snapshot();
        // Find the region that starts before the range and extends into it, and the last region that starts in the
        // range.
        let first = table.find(gpa).filter(|region| region.gpa < gpa);
        let mut ends = first.into_iter().chain(table.starting_in(gpa, last).last());
        if let Some(part) = ends.find(|region| region.gpa < gpa || region.end().saturating_sub(1) > last) {
            let reason = format!(
                "the range at {gpa:#x} of {size:#x} bytes splits the region at {:#x} of {:#x} bytes",
                part.gpa, part.size
            );
            return refuse(Errno::INVAL, reason);
        }
        drop(table);
        Ok(self.unmap_range(device, gpa, last))
    }

    /// Removes the regions that start in `gpa..=last`. Returns their total size in bytes.
    fn unmap_range(&mut self, device: &mut dyn Device, gpa: u64, last: u64) -> u64 {
        let table = self.link.memory().snapshot();
        let there: Vec<_> = table.starting_in(gpa, last).iter().map(|region| (region.gpa, region.size)).collect();
        // Drop the snapshot: modifying a table that is still referenced would copy it.
        drop(table);
        let mut bytes = 0u64;
        for (gpa, size) in there {
            // Remove the region from the table first, so that no thread finds it while the device ends its accesses.
            self.link.memory().remove(gpa);
            device.dma_unmap(gpa, size);
            bytes = bytes.saturating_add(size);
        }
        self.gauge_memory();
        bytes
    }

    fn gauge_memory(&self) {
        let table = self.link.memory().snapshot();
        let regions = u64::try_from(table.regions().len()).unwrap_or(u64::MAX);
        self.link.counters().dma_regions.store(regions, std::sync::atomic::Ordering::Relaxed);
        self.link.counters().dma_bytes.store(table.mapped_bytes(), std::sync::atomic::Ordering::Relaxed);
    }

    fn region_info(&self, header: &Header, request: RegionInfoBody, out: &mut Outbox) -> Result<(), Refusal> {
        let Some(index) = RegionIndex::from_wire(request.index) else {
            return refuse(Errno::INVAL, format!("region {} does not exist", request.index));
        };
        let Some(region) = self.regions.get(usize::from(index as u8)) else {
            return refuse(Errno::INVAL, "no such region");
        };
        let fixed = wire_len(size_of::<RegionInfoBody>());
        if request.argsz < fixed {
            let reason =
                format!("the client accepts {} bytes, but a region's description has {fixed} bytes", request.argsz);
            return refuse(Errno::INVAL, reason);
        }
        let mut info = RegionInfoBody { argsz: fixed, index: request.index, size: region.size(), ..Default::default() };
        if region.readable() {
            info.flags |= REGION_READ;
        }
        if region.writable() {
            info.flags |= REGION_WRITE;
        }
        let mut caps = Vec::new();
        // A client that does not accept descriptors cannot map memory.
        let takes_fds = self.peer.is_some_and(|peer| peer.takes_fds);
        let mappable = region.mappable().filter(|_| takes_fds);
        if let Some(mappable) = mappable {
            // The file offset stays 0, because it equals the region offset.
            info.flags |= REGION_MMAP | REGION_CAPS;
            // Set the offset even if the capabilities do not fit, because QEMU checks it before it repeats the request.
            info.cap_offset = fixed;
            let nr_areas = wire_len(mappable.areas().len());
            caps.extend_from_slice(
                SparseMmapCap { id: CAP_SPARSE_MMAP, version: 1, nr_areas, ..Default::default() }.as_bytes(),
            );
            for &MmapArea { offset, size } in mappable.areas() {
                caps.extend_from_slice(SparseArea { offset, size }.as_bytes());
            }
            info.argsz = fixed.saturating_add(wire_len(caps.len()));
        }
        if header.no_reply() {
            return Ok(());
        }
        // Send the descriptor only with the capabilities. Otherwise, a client that repeats the request would receive it
        // twice.
        if request.argsz < info.argsz {
            caps.clear();
        } else if let Some(mappable) = mappable {
            out.attach(Arc::clone(mappable.file()));
        }
        out.reply(header, &info, &caps);
        Ok(())
    }

    /// Logs and counts a rejected request, and sends an error reply unless the client expects none.
    fn refuse(&mut self, header: &Header, body: &[u8], refusal: Refusal, out: &mut Outbox) {
        self.log(header, &refusal.reason);
        let counters = self.link.counters();
        if header.no_reply() {
            add(&counters.posted_errors, 1);
            return;
        }
        add(&counters.errors, 1);
        let errno = errno_number(refusal.errno);
        if self.peer.is_none_or(|peer| peer.complete) {
            return out.error(header, errno, &[]);
        }
        // A client that is not `complete` expects the full reply even on an error, and would wait forever for the
        // missing bytes.
        match header.command() {
            Command::REGION_READ => {
                let count = crate::protocol::RegionAccess::read_from_prefix(body).map_or(0, |(access, _)| access.count);
                let count = usize::try_from(count).unwrap_or(usize::MAX).min(self.max_transfer);
                let mut filler = body.get(..16).unwrap_or_default().to_vec();
                filler.resize(filler.len().saturating_add(count), 0xff);
                out.error(header, errno, &filler);
            }
            Command::REGION_WRITE => out.error(header, errno, body.get(..16).unwrap_or_default()),
            Command::DMA_UNMAP => out.error(header, errno, body.get(..24).unwrap_or_default()),
            _ => out.error(header, errno, &[]),
        }
    }

    /// Logs a client error: all of the first errors, and increasingly fewer of the later ones.
    pub fn log(&mut self, header: &Header, reason: &str) {
        self.refused = self.refused.saturating_add(1);
        if worth_logging(self.refused) {
            let command = tracing::field::display(header.command());
            tracing::warn!(command, reason, count = self.refused, "VMM request rejected");
        }
    }

    /// Handles the link's requests: checks for withdrawn or private memory, and sends requests to the client.
    pub fn work(&mut self, device: &mut dyn Device, out: &mut Outbox, limit: usize) -> Result<(), Fatal> {
        let Some(peer) = self.peer else { return Ok(()) };
        let withdrawals = withdrawals();
        if withdrawals != self.withdrawals {
            self.withdrawals = withdrawals;
            let table = self.link.memory().snapshot();
            if let Some(region) = table.regions().iter().find(|region| region.is_withdrawn()) {
                add(&self.link.counters().withdrawn, 1);
                return Err(Fatal::Withdrawn { gpa: region.gpa });
            }
        }
        if self.link.take_check_shared() {
            add(&self.link.counters().share_checks, 1);
            self.share.start(&self.link.memory().snapshot(), peer.complete);
        }
        for (gpa, file_bytes) in self.share.step(&self.link) {
            add(&self.link.counters().not_shared, 1);
            tracing::error!(
                gpa = format_args!("{gpa:#x}"),
                file_bytes,
                "guest memory is private to the VMM, so the device would read zeros; start QEMU with share=on (for \
                 example -object memory-backend-memfd,id=m0,size=...,share=on -machine memory-backend=m0), or \
                 cloud-hypervisor with --memory shared=on"
            );
            device.memory_not_shared(gpa);
        }
        self.link.dma().send(out.raw(), limit);
        Ok(())
    }

    pub fn close(&mut self, device: &mut dyn Device) {
        self.complete_deferred(device);
        if self.peer.take().is_none() {
            return;
        }
        self.link.dma().disconnect();
        self.share = ShareCheck::default();
        self.unmap_range(device, 0, u64::MAX);
        self.link.memory().first_touches().forget();
        self.migration = Migrating::default();
        self.link.memory().writes().set(false);
        self.link.interrupts().detach_all();
        self.link.set_client(None);
        device.disconnected();
    }
}

fn reply(header: &Header, body: &(impl IntoBytes + Immutable), out: &mut Outbox) -> Result<(), Refusal> {
    if !header.no_reply() {
        out.reply(header, body, &[]);
    }
    Ok(())
}

pub(super) fn too_short(body: &[u8], want: usize) -> Refusal {
    Refusal { errno: Errno::INVAL, reason: format!("the message has only {} of at least {want} bytes", body.len()) }
}

pub(super) fn parse<T: FromBytes>(body: &[u8]) -> Result<T, Refusal> {
    T::read_from_prefix(body).map(|(value, _)| value).map_err(|_| too_short(body, size_of::<T>()))
}

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(source) => format!("{error}: {}", chain(source)),
    }
}

fn errno_number(errno: Errno) -> u32 {
    u32::try_from(errno.raw_os_error()).unwrap_or(0)
}

pub(super) fn wire_len(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
