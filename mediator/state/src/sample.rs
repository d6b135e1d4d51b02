//! A sample card with two VMs, for tests.

use crate::fuzz::{Host, VRAM, config};
use crate::memory::PoolMemory;
use crate::{SavedCard, SavedTenancy, SavedVm, Surroundings};
use channels::{Bind, Channels, GuestInstance};
use devmodel::{Aperture, Backend, ChannelState, Denied, EngineStatus, InterruptLine, Place, VGpu, WriteFailure};
use nvspec::addr::{GuestVramAddr, VramAddr};
use nvspec::fifo::{ChannelId, VirtualChannelId};
use nvspec::regs::pfifo;
use pv::{Kind, TableId, Tables};
use sched::{Channel, Config, Engine, Event, Nanos, Pipeline, Scheduler, Ticket, VgpuParams};
use shadow_pt::{AddressSpaces, Limits, Mode};
use std::collections::BTreeMap;
use vram::{Balancer, CHUNK_BYTES_MIN, ChunkTable, Contents, PagePool, Quanta, QuantaConfig, TenantId};

/// A card that only stores register values, and a no-op vGPU backend.
#[derive(Default)]
pub(crate) struct Nothing(BTreeMap<u32, u32>);

impl channels::Host for Nothing {
    fn read32(&mut self, offset: u32) -> u32 {
        self.0.get(&offset).copied().unwrap_or(0)
    }
    fn write32(&mut self, offset: u32, value: u32) {
        self.0.insert(offset, value);
    }
    fn vram_read(&mut self, _: VramAddr, data: &mut [u8]) {
        data.fill(0);
    }
    fn vram_write(&mut self, _: VramAddr, _: &[u8]) {}
    fn vram_flush(&mut self) {}
    fn userd_read(&mut self, _: ChannelId, _: u64) -> u32 {
        0
    }
    fn userd_write(&mut self, _: ChannelId, _: u64, _: u32) {}
}

impl Backend for Nothing {
    fn vram_read(&mut self, _: GuestVramAddr, _: &mut [u8]) -> Result<(), Denied> {
        Ok(())
    }
    fn vram_write(&mut self, _: GuestVramAddr, _: &[u8]) -> Result<(), WriteFailure> {
        Ok(())
    }
    fn aperture_read(&mut self, _: Aperture, _: u64, _: &mut [u8]) -> Result<(), Denied> {
        Ok(())
    }
    fn aperture_write(&mut self, _: Aperture, _: u64, _: &[u8]) -> Result<(), WriteFailure> {
        Ok(())
    }
    fn bind_aperture(&mut self, _: Aperture, _: Option<Place>) {}
    fn flush_tlb(&mut self, _: Option<Place>, _: bool) {}
    fn bind_channel(&mut self, _: VirtualChannelId, _: Option<Place>) {}
    fn enable_channel(&mut self, _: VirtualChannelId, _: bool) {}
    fn channel_state(&mut self, _: VirtualChannelId) -> ChannelState {
        ChannelState::default()
    }
    fn submit_runlist(&mut self, _: Place, _: u32) {}
    fn preempt(&mut self, _: VirtualChannelId) {}
    fn preempting(&mut self, _: VirtualChannelId) -> bool {
        false
    }
    fn engine_status(&mut self, _: u32) -> EngineStatus {
        EngineStatus::default()
    }
    fn block_engines(&mut self, _: u32, _: bool) {}
    fn reset_engine(&mut self, _: u32) {}
    fn reset_fifo(&mut self) {}
    fn now_ns(&mut self) -> u64 {
        5
    }
    fn interrupt(&mut self, _: InterruptLine) {}
    fn bus_master(&mut self, _: bool) {}
}

/// Creates a card with two VMs. Each VM has a channel, memory, a shadow directory and queued work. The first VM uses
/// the paravirtual interface.
pub(crate) fn card() -> SavedCard {
    let mut chunks = ChunkTable::new(600 * CHUNK_BYTES_MIN, CHUNK_BYTES_MIN, Contents::Zeroed).unwrap();
    chunks.set_host_budget(8);
    let mut pool = PagePool::new(u64::MAX);
    pool.alloc(&mut chunks, 0x3000).unwrap();
    let mut channels = Channels::new(Host.layout(), &[7; 0x1000]);
    // Use fixed values, so that changed defaults do not affect the seeds of the fuzz target.
    let pipeline = Pipeline { contended: 2, alone: 64, ahead_ns: 1_000_000 };
    let mut scheduler = Scheduler::new(Config { pipeline, ..Config::default() }, Nanos(0)).unwrap();
    let mut vms = Vec::new();
    for number in 1..3 {
        let vm = TenantId(number);
        chunks.create_vm(vm, VRAM, vram::Limits::default()).unwrap();
        chunks.place(vm, GuestVramAddr(0)).unwrap();
        channels.add_vm(vm, 16);
        let added = Event::Added { vgpu: vm, params: VgpuParams::weight(number) };
        scheduler.event(Nanos(10), added, &mut Vec::new());
        let (channel, ticket) = (Channel(0), Ticket(number.into()));
        let arrival = Event::Arrival { vgpu: vm, channel, engine: Engine::Copy0, ticket };
        scheduler.event(Nanos(20), arrival, &mut Vec::new());
        vms.push(saved_vm(vm, &mut chunks, &mut channels));
    }
    let balancer = Balancer::new(vram::balance::Config::default());
    let quanta = Quanta::new(QuantaConfig::default());
    SavedCard {
        balancer: balancer.save(),
        tenancy: SavedTenancy { scheduler: scheduler.save(), quanta: quanta.save() },
        channels: channels.save(),
        pool: pool.save(),
        chunks: chunks.save(),
        segments: Vec::new(),
        vms,
    }
}

fn saved_vm(vm: TenantId, chunks: &mut ChunkTable, channels: &mut Channels) -> SavedVm {
    let mut pool = PagePool::new(u64::MAX);
    let mut write = |_: VramAddr, _: &[u8]| {};
    let mut memory = PoolMemory { pool: &mut pool, chunks, write: &mut write };
    let mut spaces = AddressSpaces::new(Mode::LazyAdd, Limits { table_bytes: 1 << 20 });
    let id = spaces.open(Place::Vram(GuestVramAddr(0x4000)), &mut memory).unwrap();
    let directory = spaces.directory(id).unwrap();
    let (mut gpu, mut nothing) = (VGpu::new(config()).unwrap(), Nothing::default());
    gpu.bar0_write32(pfifo::CHANNEL::at(3), 0x8000_0005, &mut nothing);
    let mut block = [0; 4096];
    block[0x200] = 0;
    let guest = GuestInstance::parse(&block).unwrap();
    let bind = Bind { instance: Place::Vram(GuestVramAddr(0x5000)), guest: &guest, directory };
    channels.bind(&mut nothing, vm, VirtualChannelId(3), bind).unwrap();
    let tables = (vm.0 == 1).then(|| {
        let mut tables = Tables::new(GuestVramAddr(VRAM), 4 << 20);
        tables.create(TableId::new(1).unwrap(), Kind::Directory).unwrap();
        tables.create(TableId::new(2).unwrap(), Kind::Small).unwrap();
        tables.set(TableId::new(1).unwrap(), 0, TableId::new(2), None).unwrap();
        tables.save()
    });
    SavedVm { vm, gpu: gpu.save(), spaces: spaces.save(), tables, pool: pool.save() }
}
