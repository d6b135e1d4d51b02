//! Restores a card from its parts.

use crate::agree::{agree_on_vms, check_channels, check_vram};
use crate::memory::PoolMemory;
use crate::{SavedCard, SavedVm};
use channels::{Channels, Layout};
use devmodel::{VGpu, VGpuConfig};
use nvspec::addr::{GuestVramAddr, VramAddr};
use pv::Tables;
use saved_state::Invalid;
use sched::{Nanos, Scheduler};
use shadow_pt::{AddressSpaces, Limits, Mode};
use std::collections::BTreeMap;
use vram::{Balancer, ChunkTable, PagePool, Quanta, TenantId, UnclaimedChunks};

/// Configuration of the restored card and its VMs, and access to the card's memory.
pub trait Surroundings {
    /// Returns the addresses of the mediator's structures on the card.
    fn layout(&self) -> Layout;

    /// Returns the first chunk and the number of chunks of the mediator's structures.
    fn own(&self) -> (u32, u32);

    /// Returns the current time of the scheduler's clock in ns.
    fn now_ns(&self) -> u64;

    /// Returns the configuration of a VM, or `None` if the VM is not configured.
    fn vm(&self, vm: TenantId) -> Option<VmSurroundings>;

    /// Writes card memory.
    fn write(&mut self, address: VramAddr, data: &[u8]);
}

/// Configuration of a VM.
#[derive(Clone, Debug)]
pub struct VmSurroundings {
    /// Configuration of the vGPU.
    pub config: VGpuConfig,
    /// TLB flush mode.
    pub mode: Mode,
    /// Limits on shadow tables.
    pub limits: Limits,
    /// Maximum size of the page tables that the mediator maintains for the VM, in bytes.
    pub table_bytes: u64,
}

/// A restored card.
#[derive(Debug)]
pub struct RestoredCard {
    /// Chunk owners.
    pub chunks: ChunkTable,
    /// Policy that selects chunks to move.
    pub balancer: Balancer,
    /// Memory quanta of the VMs.
    pub quanta: Quanta,
    /// Physical channels.
    pub channels: Channels,
    /// Scheduler.
    pub scheduler: Scheduler,
    /// Pages of the mediator's own pool.
    pub pool: PagePool,
    /// Pages of shared segments, by creator.
    pub segments: BTreeMap<TenantId, PagePool>,
    /// VMs, by number.
    pub vms: BTreeMap<TenantId, RestoredVm>,
}

/// A restored VM, whose address spaces do not map guest memory yet.
#[derive(Debug)]
pub struct RestoredVm {
    /// Registers of the vGPU.
    pub gpu: VGpu,
    /// Address spaces of the VM.
    pub spaces: AddressSpaces,
    /// Page tables that the mediator maintains for the VM.
    pub tables: Option<Tables>,
    /// Card memory pages of the VM's shadow tables.
    pub pool: PagePool,
}

impl SavedCard {
    /// Restores the card and its VMs. Only the page directories of address spaces are written to the card.
    ///
    /// # Errors
    /// Returns an error if a part is invalid or inconsistent with another part. In this case, some page directories may
    /// already have been written, and their channels must not run.
    pub fn restore(self, host: &mut impl Surroundings) -> Result<RestoredCard, Invalid> {
        let Self { chunks, balancer, tenancy, channels, pool, segments, vms } = self;
        let mut chunks = ChunkTable::try_from(chunks)?;
        let balancer = Balancer::restored(balancer, &chunks)?;
        let channels = Channels::restored(channels, host.layout())?;
        let (scheduler, quanta) = tenancy.restored(Nanos(host.now_ns()))?;
        let mut unclaimed = chunks.unclaimed();
        let (first, count) = host.own();
        unclaimed.claim(first, count)?;
        let pool = PagePool::restored(pool, &chunks, &mut unclaimed)?;
        let segments =
            segments.into_iter().map(|(vm, pool)| Ok((vm, PagePool::restored(pool, &chunks, &mut unclaimed)?)));
        let segments = segments.collect::<Result<BTreeMap<_, _>, Invalid>>()?;
        agree_on_vms(&chunks, &channels, &scheduler, vms.iter().map(|vm| vm.vm))?;
        let mut restored = BTreeMap::new();
        for saved in vms {
            let vm = saved.vm;
            let one = saved.restore(&mut chunks, &mut unclaimed, host).map_err(|why| of_vm(vm, &why))?;
            check_vram(vm, &one.gpu, &chunks).map_err(|why| of_vm(vm, &why))?;
            restored.insert(vm, one);
        }
        unclaimed.finish()?;
        check_channels(&channels, &restored)?;
        Ok(RestoredCard { chunks, balancer, quanta, channels, scheduler, pool, segments, vms: restored })
    }
}

fn of_vm(vm: TenantId, why: &Invalid) -> Invalid {
    Invalid::new(format_args!("VM {vm}: {why}"))
}

impl SavedVm {
    fn restore(
        self,
        chunks: &mut ChunkTable,
        unclaimed: &mut UnclaimedChunks,
        host: &mut impl Surroundings,
    ) -> Result<RestoredVm, Invalid> {
        let Self { vm, gpu, spaces, tables, pool } = self;
        let set = host.vm(vm).ok_or_else(|| Invalid::new("the VM is not configured"))?;
        let VmSurroundings { config, mode, limits, table_bytes } = set;
        let base = GuestVramAddr(config.vram_bytes);
        let gpu = VGpu::restored(gpu, config)?;
        let tables = tables.map(|tables| Tables::restored(tables, base, table_bytes)).transpose()?;
        let mut pool = PagePool::restored(pool, chunks, unclaimed)?;
        let own = pool.allocations();
        let mut write = |address: VramAddr, data: &[u8]| host.write(address, data);
        let mut memory = PoolMemory { pool: &mut pool, chunks, write: &mut write };
        let owns = |at: VramAddr, bytes| own.holds(VramAddr(at.0), bytes);
        let spaces = AddressSpaces::restored(spaces, mode, limits, &mut memory, owns)?;
        Ok(RestoredVm { gpu, spaces, tables, pool })
    }
}
