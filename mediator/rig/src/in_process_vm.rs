//! Guests without a VMM; the card and its mediator run in this process. Guests that run workloads use the library
//! `gdev` as their driver ([`LightGpu`]); guests with their own page tables or submissions use the rig's driver
//! ([`guest`]).
//!
//! Such guests need no boot, so benchmarks can sweep parameters, and tests can run many guests. They call the mediator
//! as the server does. Tests with VMs cover messages, sockets and stock drivers.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use crate::driver::{CE0, CE1, Channel, Driver, methods, object};
use crate::{Guest, Machine, Rig, settings, sharing};
use anyhow::{Context, Result, ensure};
use card_manager::{Division, Sharing};
use gdev::Tuning;
use gdev::vgpu::{Bus, Vgpu};
use parking_lot::{Mutex, MutexGuard};
use simgpu::{ComputeTiming, EngineTiming, TimeModel};
use vgpu::Settings;
use vmm_glue::RegionIndex;
use vram::{Limits, TenantId, VmSummary};

/// Bytes per MiB.
pub const MIB: u64 = 1 << 20;
/// Maximum time that work waits for memory.
const QUEUE_LIMIT: Duration = Duration::from_secs(60);

/// Settings of a card, and the division of its memory.
#[derive(Clone, Copy, Debug)]
pub struct CardConfig {
    /// Memory that VMs share, in MiB.
    pub card_mib: u64,
    /// Host memory for chunks, in MiB.
    pub host_mib: u64,
    /// Size of a chunk in bytes.
    pub chunk_bytes: u64,
    /// Policy for the division of memory.
    pub division: Division,
    /// Timing model of work.
    pub time: Option<TimeModel>,
    /// True if the card records the order of its engines' accesses ([`simgpu::SimGpu::take_touches`]). A single thread
    /// then executes kernels, which makes the order deterministic.
    pub traced: bool,
}

impl CardConfig {
    /// Creates the configuration of a card with chunks of 2 MiB, on which work takes no time.
    #[must_use]
    pub fn new(card_mib: u64, host_mib: u64) -> Self {
        Self { card_mib, host_mib, chunk_bytes: 2 * MIB, division: Division::default(), time: None, traced: false }
    }

    /// Starts the card.
    ///
    /// # Errors
    /// Returns an error if the sizes are invalid for a card.
    pub fn open(&self) -> Result<Rig> {
        // The mediator's data structures occupy three chunks, and two more stay in reserve.
        let reserve_bytes = (16 * MIB).max(5 * self.chunk_bytes);
        let vram_mib = u32::try_from(self.card_mib + reserve_bytes / MIB)?;
        let sharing = Sharing {
            chunk_bytes: self.chunk_bytes,
            reserve_bytes,
            host_bytes: self.host_mib * MIB,
            division: self.division,
            ..sharing()
        };
        let (profile, compute_workers) = (self.traced, self.traced.then_some(0));
        let config =
            simgpu::Config { vram_mib, time: self.time, profile, compute_workers, ..simgpu::Config::default() };
        Ok(Rig::made(&config, &sharing, |card| card))
    }
}

/// Returns a timing model in which engines transfer `vram` bytes of card memory or `bus` bytes of host memory per
/// second.
#[must_use]
pub fn timing(vram: u64, bus: u64) -> TimeModel {
    let engine = EngineTiming { bytes_per_second: vram, launch_ns: 5_000 };
    let compute = ComputeTiming::at(1150, vram);
    TimeModel { graph: engine, compute, copy: engine, switch_ns: 10_000, bus_bytes_per_second: bus }
}

/// Adds a VM with `vram_mib` MiB of VRAM, 1 MiB of RAM and a running driver.
///
/// # Errors
/// Returns an error if the RAM cannot be allocated.
pub fn guest(rig: &Rig, vm: u32, vram_mib: u64, memory: Limits) -> Result<Driver> {
    let mut guest = rig.guest_with(vm, &patient(vram_mib, memory));
    ensure!(guest.map_ram(0, MIB, true), "no RAM");
    Ok(Driver::new(guest))
}

/// Returns the settings of a VM whose work waits for memory.
fn patient(vram_mib: u64, memory: Limits) -> Settings {
    let mut settings = Settings { queue_limit: QUEUE_LIMIT, ..settings(vram_mib, 8) };
    settings.share.memory = memory;
    settings
}

/// Returns the memory usage of a VM.
///
/// # Errors
/// Returns an error if the VM does not exist.
pub fn account(rig: &Rig, vm: u32) -> Result<VmSummary> {
    rig.usage().0.vms.get(&TenantId(vm)).copied().with_context(|| format!("no VM {vm}"))
}

/// Waits until all work submitted on a channel has completed.
///
/// # Errors
/// Returns an error if the GPU faults or the device is gone.
pub fn wait<M: Machine>(driver: &mut Driver<M>, channel: &Channel) -> Result<()> {
    while !driver.is_done(channel) {
        ensure!(driver.faults.is_empty(), "the GPU reports faults: {:x?}", driver.faults);
        ensure!(driver.guest.wait_msi(), "the device is gone");
        driver.service();
    }
    Ok(())
}

/// Returns push buffer words that bind a copy engine and copy one line.
#[must_use]
pub fn copy_line(engine: u32, from: u64, to: u64, bytes: u32) -> Vec<u32> {
    let halves = |va: u64| [(va >> 32) as u32, va as u32];
    let ([from_high, from], [to_high, to]) = (halves(from), halves(to));
    let mut words = object(if engine == 0 { CE0 } else { CE1 });
    words.extend(methods(4, 0x30c, &[from_high, from, to_high, to, bytes, bytes, bytes, 1]));
    words.extend(methods(4, 0x300, &[0x110]));
    words
}

/// Guest with the library `gdev` as its driver. The CPU transfers inputs and results, as if through an aperture.
pub type LightGpu = gdev::Context<Vgpu>;

/// Copy limits that make the CPU perform all copies that do not depend on submitted work.
const BY_CPU: Tuning = Tuning { direct_write_bytes: u64::MAX, direct_read_bytes: u64::MAX, ..gdev::vgpu::TUNING };

/// A VM shared by a test and the VM's driver.
#[derive(Clone)]
pub struct SharedGuest(Arc<Mutex<Guest>>);

impl SharedGuest {
    /// Adds a VM with `vram_mib` MiB of VRAM.
    #[must_use]
    pub fn new(rig: &Rig, vm: u32, vram_mib: u64, memory: Limits) -> Self {
        Self(Arc::new(Mutex::new(rig.guest_with(vm, &patient(vram_mib, memory)))))
    }

    /// Locks the VM, which blocks the VM's driver.
    pub fn lock(&self) -> MutexGuard<'_, Guest> {
        self.0.lock()
    }

    /// Starts a driver in the VM, which must not have one yet.
    ///
    /// # Errors
    /// Returns an error if the driver does not start.
    pub fn start(&self) -> Result<LightGpu> {
        let mut guest = self.lock();
        guest.write(RegionIndex::Config, 4, &6u16.to_le_bytes());
        guest.write(RegionIndex::Config, 0x6a, &1u16.to_le_bytes());
        let msi = guest.msi.try_clone()?;
        drop(guest);
        Ok(gdev::Context::new(Vgpu::on(Box::new(self.clone()), msi)?, BY_CPU))
    }

    /// Removes the VM as an operator would.
    ///
    /// # Errors
    /// Returns an error if the VM cannot be removed, or if it still has a driver.
    pub fn remove(self) -> Result<()> {
        let guest = Arc::into_inner(self.0).context("the VM still has a driver")?;
        Ok(guest.into_inner().remove()?)
    }
}

impl fmt::Debug for SharedGuest {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_struct("SharedGuest").finish_non_exhaustive()
    }
}

impl Bus for SharedGuest {
    fn read_config(&mut self, bytes: &mut [u8]) -> gdev::Result<()> {
        self.lock().read(RegionIndex::Config, 0, bytes);
        Ok(())
    }

    fn read32(&mut self, offset: u32) -> gdev::Result<u32> {
        Ok(self.lock().rd(offset))
    }

    fn write32(&mut self, offset: u32, value: u32) -> gdev::Result<()> {
        self.lock().wr(offset, value);
        Ok(())
    }

    fn write_bar1(&mut self, offset: u64, value: u32) -> gdev::Result<()> {
        self.lock().write(RegionIndex::Bar1, offset, &value.to_le_bytes());
        Ok(())
    }

    fn write_vram(&mut self, at: u64, bytes: &[u8]) -> gdev::Result<()> {
        self.lock().vram_write(at, bytes);
        Ok(())
    }

    fn read_vram(&mut self, at: u64, bytes: &mut [u8]) -> gdev::Result<()> {
        self.lock().vram_read(at, bytes);
        Ok(())
    }

    fn map_ram(&mut self, gpa: u64, bytes: u64, file: &OwnedFd) -> gdev::Result<()> {
        let refused = |source| gdev::Error::Driver { what: format!("{bytes} bytes of RAM at {gpa:#x}"), source };
        let file = file.try_clone().map_err(refused)?;
        match self.lock().lend_ram(gpa, bytes, true, file) {
            true => Ok(()),
            false => Err(refused(io::Error::other("the device rejects them"))),
        }
    }

    fn unmap_ram(&mut self, gpa: u64, _: u64) -> gdev::Result<()> {
        drop(self.lock().unmap_ram(gpa));
        Ok(())
    }
}

/// Adds a VM with `vram_mib` MiB of VRAM, and with the library `gdev` as its driver.
///
/// # Errors
/// Returns an error if the driver does not start.
pub fn gpu(rig: &Rig, vm: u32, vram_mib: u64, memory: Limits) -> Result<LightGpu> {
    SharedGuest::new(rig, vm, vram_mib, memory).start()
}

#[cfg(test)]
mod tests;
