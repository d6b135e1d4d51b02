//! Guests that compute without a VMM: a card and its mediator in this process. The library `gdev` drives guests that
//! run workloads ([`LightGpu`]); the rig's driver is for guests that need their own page tables or submissions
//! ([`guest`]).
//!
//! Such guests need no boot, so benchmarks can sweep parameters and tests can run many guests. Both call the mediator
//! in the same way as the server. Tests with VMs cover messages, sockets and stock drivers.

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

/// Size of a MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// Maximum time for which work may wait for memory.
const QUEUE_LIMIT: Duration = Duration::from_secs(60);

/// A card and the division of its memory.
#[derive(Clone, Copy, Debug)]
pub struct CardConfig {
    /// Memory shared by the VMs, in MiB.
    pub card_mib: u64,
    /// Size of host memory for chunks, in MiB.
    pub host_mib: u64,
    /// Size of a chunk in bytes.
    pub chunk_bytes: u64,
    /// Division of memory.
    pub division: Division,
    /// Model of the time that work takes.
    pub time: Option<TimeModel>,
    /// Set if the card records its engines' accesses in order ([`simgpu::SimGpu::take_touches`]). One thread then
    /// executes kernels, so that the order is always the same.
    pub traced: bool,
}

impl CardConfig {
    /// Creates a configuration with chunks of 2 MiB, in which work takes no time.
    #[must_use]
    pub fn new(card_mib: u64, host_mib: u64) -> Self {
        Self { card_mib, host_mib, chunk_bytes: 2 * MIB, division: Division::default(), time: None, traced: false }
    }

    /// Starts the card.
    ///
    /// # Errors
    /// Returns an error if the sizes are not valid for a card.
    pub fn open(&self) -> Result<Rig> {
        // The mediator's structures use three chunks, and it keeps two more in reserve.
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

/// Returns a time model in which engines move `vram` bytes per second of card memory and `bus` bytes per second of host
/// memory.
#[must_use]
pub fn timing(vram: u64, bus: u64) -> TimeModel {
    let engine = EngineTiming { bytes_per_second: vram, launch_ns: 5_000 };
    let compute = ComputeTiming::at(1150, vram);
    TimeModel { graph: engine, compute, copy: engine, switch_ns: 10_000, bus_bytes_per_second: bus }
}

/// Adds a VM with `vram_mib` MiB of VRAM, a running driver and 1 MiB of RAM.
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

/// Returns a VM's account.
///
/// # Errors
/// Returns an error if the VM does not exist.
pub fn account(rig: &Rig, vm: u32) -> Result<VmSummary> {
    rig.usage().0.vms.get(&TenantId(vm)).copied().with_context(|| format!("no VM {vm}"))
}

/// Waits until all work submitted on a channel is complete.
///
/// # Errors
/// Returns an error if the GPU faults.
pub fn wait<M: Machine>(driver: &mut Driver<M>, channel: &Channel) -> Result<()> {
    while !driver.is_done(channel) {
        ensure!(driver.faults.is_empty(), "the GPU faults: {:x?}", driver.faults);
        ensure!(driver.guest.wait_msi(), "the device has gone");
        driver.service();
    }
    Ok(())
}

/// Returns methods that bind a copy engine and copy one line.
#[must_use]
pub fn copy_line(engine: u32, from: u64, to: u64, bytes: u32) -> Vec<u32> {
    let halves = |va: u64| [(va >> 32) as u32, va as u32];
    let ([from_high, from], [to_high, to]) = (halves(from), halves(to));
    let mut words = object(if engine == 0 { CE0 } else { CE1 });
    words.extend(methods(4, 0x30c, &[from_high, from, to_high, to, bytes, bytes, bytes, 1]));
    words.extend(methods(4, 0x300, &[0x110]));
    words
}

/// A guest that computes, whose driver is the library `gdev`. The CPU transfers inputs and results as if through an
/// aperture.
pub type LightGpu = gdev::Context<Vgpu>;

/// Limits of copies: the CPU makes all copies that no work precedes.
const BY_CPU: Tuning = Tuning { direct_write_bytes: u64::MAX, direct_read_bytes: u64::MAX, ..gdev::vgpu::TUNING };

/// A VM that a test uses next to its driver.
#[derive(Clone)]
pub struct SharedGuest(Arc<Mutex<Guest>>);

impl SharedGuest {
    /// Adds a VM with `vram_mib` MiB of VRAM.
    #[must_use]
    pub fn new(rig: &Rig, vm: u32, vram_mib: u64, memory: Limits) -> Self {
        Self(Arc::new(Mutex::new(rig.guest_with(vm, &patient(vram_mib, memory)))))
    }

    /// Locks the VM. In the meantime, the VM's driver waits.
    pub fn lock(&self) -> MutexGuard<'_, Guest> {
        self.0.lock()
    }

    /// Starts a driver in the VM, which must not have one.
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

    /// Removes the VM, as an operator would.
    ///
    /// # Errors
    /// Returns an error if the VM cannot be removed, or if its driver still exists.
    pub fn remove(self) -> Result<()> {
        let guest = Arc::into_inner(self.0).context("the VM has a driver")?;
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
            false => Err(refused(io::Error::other("the device refuses them"))),
        }
    }

    fn unmap_ram(&mut self, gpa: u64, _: u64) -> gdev::Result<()> {
        drop(self.lock().unmap_ram(gpa));
        Ok(())
    }
}

/// Adds a VM with `vram_mib` MiB of VRAM, whose driver is the library `gdev`.
///
/// # Errors
/// Returns an error if the driver does not start.
pub fn gpu(rig: &Rig, vm: u32, vram_mib: u64, memory: Limits) -> Result<LightGpu> {
    SharedGuest::new(rig, vm, vram_mib, memory).start()
}

#[cfg(test)]
mod tests;
