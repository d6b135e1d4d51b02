//! The paravirtual interface of a vGPU, for segments shared with other contexts and machines.
//!
//! The queue is one page of pinned memory, and contains one request at a time. The mediator controls access to
//! segments. `docs/design/paravirtual.md` specifies the interface.

use std::io;

use pv::abi::{Status, VERSION_MAJOR, feature, register, status};
use pv::guest::{Ops, Reply, capability};

use super::bus::Bus;
use super::device::State;
use super::ram::PinnedMemory;
use super::ranges::PAGE_BYTES;
use crate::{Error, Result};

/// Size of the part of configuration space that contains PCI capabilities, in bytes.
const CONFIG_BYTES: usize = 256;
/// Number of queue entries: a request and its reply.
const ENTRIES: u16 = 2;
/// Offset of the descriptors in the page.
const DESCRIPTORS: u64 = 0;
/// Offset of the ring of available chains in the page.
const AVAILABLE: u64 = 0x100;
/// Offset of the ring of used chains in the page.
const USED: u64 = 0x200;
/// Offset of the request in the page.
const REQUEST: u64 = 0x400;
/// Offset of the reply in the page.
const REPLY: u64 = 0x800;
/// Maximum size of a request or a reply in bytes.
const PART_BYTES: u64 = 0x400;
/// Descriptor flag: another descriptor follows.
const NEXT: u16 = 1;
/// Descriptor flag: the device writes the memory.
const DEVICE_WRITES: u16 = 2;
/// Features that this driver uses if the device offers them.
const FEATURES: u32 = feature::SHARE | feature::SHARE_ABROAD;

/// The interface, with its queue.
#[derive(Debug)]
pub(super) struct Paravirtual {
    /// Offset of the registers in BAR0.
    registers: u32,
    page: PinnedMemory,
    /// Number of requests so far, modulo 2^32.
    requests: u32,
}

impl Paravirtual {
    /// Sets up the interface.
    ///
    /// # Errors
    /// Returns an error if the VM's configuration does not offer the interface, or if the device rejects the queue.
    pub(super) fn new(device: &mut State) -> Result<Self> {
        let mut config = [0; CONFIG_BYTES];
        device.bus.read_config(&mut config)?;
        let found = capability(&config).filter(|found| {
            found.bar == 0 && found.version_major == VERSION_MAJOR && found.features & feature::SHARE != 0
        });
        let what =
            "segments: set `paravirtual.offered` for its VM, with `segments_mib` or a `group`, or use a reference";
        let found = found.ok_or(Error::Unsupported { device: "vgpu", what })?;
        let page = PinnedMemory::new(device, PAGE_BYTES)?;
        let (registers, base) = (found.offset, page.gpa());
        let halves = |register: u32, at: u64| [(register, at as u32), (register + 4, (at >> 32) as u32)];
        let addresses = [
            halves(register::QUEUE_DESCRIPTORS, base + DESCRIPTORS),
            halves(register::QUEUE_AVAILABLE, base + AVAILABLE),
            halves(register::QUEUE_USED, base + USED),
        ];
        let first = [
            (register::STATUS, status::RESET),
            (register::FEATURES, found.features & FEATURES),
            (register::QUEUE_SIZE, ENTRIES.into()),
        ];
        for (register, value) in first.into_iter().chain(addresses.concat()).chain([(register::STATUS, status::READY)])
        {
            device.bus.write32(registers + register, value)?;
        }
        let state = device.bus.read32(registers + register::STATUS)?;
        if state != status::READY {
            page.release(device);
            return Err(failed("the paravirtual interface", format!("its status is {state:#x}"), libc::EIO));
        }
        Ok(Self { registers, page, requests: 0 })
    }

    /// Executes an operation. Returns the value in its reply. `label` describes the operation in errors.
    ///
    /// # Errors
    /// Returns an error if the mediator rejects the operation, or if the daemon is lost.
    pub(super) fn call(&mut self, bus: &mut dyn Bus, ops: &Ops, label: &str) -> Result<u64> {
        let request = ops.bytes();
        let base = self.page.gpa();
        self.page.write(REQUEST, &request);
        self.page.write(DESCRIPTORS, &descriptor(base + REQUEST, request.len() as u32, NEXT, 1));
        self.page.write(DESCRIPTORS + 16, &descriptor(base + REPLY, PART_BYTES as u32, DEVICE_WRITES, 0));
        let slot = u64::from(self.requests) % u64::from(ENTRIES);
        // The chain starts with descriptor 0.
        self.page.write(AVAILABLE + 4 + 2 * slot, &[0; 2]);
        self.requests = self.requests.wrapping_add(1);
        self.page.write(AVAILABLE + 2, &(self.requests as u16).to_le_bytes());
        bus.write32(self.registers + register::DOORBELL, 0)?;
        // The device completes this read after the request.
        let ended = bus.read32(self.registers + register::ENDED)?;
        if ended != self.requests {
            let state = bus.read32(self.registers + register::STATUS)?;
            let why = format!("the mediator did not execute it; the status of the interface is {state:#x}");
            return Err(failed(label, why, libc::EIO));
        }
        let mut length = [0; 4];
        self.page.read(USED + 4 + 8 * slot + 4, &mut length);
        let mut reply = vec![0; u64::from(u32::from_le_bytes(length)).min(PART_BYTES) as usize];
        self.page.read(REPLY, &mut reply);
        let reply = Reply::read(&reply);
        match (reply.status, reply.answers.last()) {
            (0, Some((0, value))) => Ok(*value),
            (status, _) => {
                let (why, number) = reason(status);
                Err(failed(label, why, number))
            }
        }
    }
}

/// Returns an encoded descriptor.
fn descriptor(at: u64, bytes: u32, flags: u16, next: u16) -> Vec<u8> {
    [&at.to_le_bytes()[..], &bytes.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
}

fn failed(what: &str, why: String, number: i32) -> Error {
    Error::Driver { what: format!("{what}: {why}"), source: io::Error::from_raw_os_error(number) }
}

/// Converts a status to an error message and the error number that the guest driver uses.
fn reason(status: u32) -> (String, i32) {
    let known = [
        (Status::Unsupported, libc::EOPNOTSUPP),
        (Status::NoObject, libc::ENOENT),
        (Status::Exists, libc::EEXIST),
        (Status::Range, libc::ERANGE),
        (Status::Invalid, libc::EINVAL),
        (Status::Limit, libc::ENOSPC),
        (Status::Denied, libc::EACCES),
        (Status::Failed, libc::EIO),
    ];
    let found = known.into_iter().find(|(known, _)| *known as u32 == status);
    found.map_or_else(|| (format!("status {status}"), libc::EIO), |(known, number)| (known.to_string(), number))
}
