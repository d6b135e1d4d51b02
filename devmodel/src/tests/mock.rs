//! A mock mediator that records calls.

use crate::backend::{
    Aperture, Backend, ChannelState, Denied, EngineStatus, InterruptLine, NoMemory, Place, WriteFailure,
};
use crate::{VGpu, VGpuConfig};
use nvspec::addr::GuestVramAddr;
use nvspec::chip::GF100;
use nvspec::fifo::VirtualChannelId;
use std::sync::Arc;

/// Size of the tested vGPU's VRAM in bytes.
pub const VRAM: u64 = 16 << 20;

/// A recorded call. Memory accesses and clock reads are not recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    BindAperture(Aperture, Option<Place>),
    PlaceWindow(Option<GuestVramAddr>),
    FlushTlb(Option<Place>, bool),
    FlushApertures,
    Bind(u8, Option<Place>),
    Enable(u8, bool),
    Runlist(Place, u32),
    Preempt(u8),
    Block(u32, bool),
    ResetEngine(u32),
    ResetFifo,
    Interrupt(InterruptLine),
    BusMaster(bool),
}

/// A mediator that records calls. A buffer backs VRAM, and both apertures identity-map the first half of VRAM.
pub struct Mock {
    pub vram: Vec<u8>,
    pub calls: Vec<Call>,
    pub now: u64,
    pub channel: ChannelState,
    pub engine: EngineStatus,
    pub preempting: bool,
    /// True if no memory is available for writes.
    pub lacks_memory: bool,
}

impl Default for Mock {
    fn default() -> Self {
        Self {
            vram: vec![0; VRAM as usize],
            calls: Vec::new(),
            now: 1_000_000,
            channel: ChannelState::default(),
            preempting: false,
            lacks_memory: false,
            engine: EngineStatus::default(),
        }
    }
}

impl Mock {
    /// Removes and returns the recorded calls.
    pub fn take(&mut self) -> Vec<Call> {
        std::mem::take(&mut self.calls)
    }

    /// Removes all recorded calls, and returns the number of MSI messages among them.
    pub fn messages(&mut self) -> usize {
        self.take().iter().filter(|call| **call == Call::Interrupt(InterruptLine::Msi)).count()
    }

    /// Returns an error if no memory is available for writes.
    fn memory(&self) -> Result<(), NoMemory> {
        if self.lacks_memory { Err(NoMemory) } else { Ok(()) }
    }

    fn range(&self, address: u64, bytes: usize, limit: u64) -> Result<std::ops::Range<usize>, Denied> {
        let end = address.checked_add(bytes as u64).filter(|end| *end <= limit).ok_or(Denied)?;
        Ok(address as usize..end as usize)
    }
}

impl Backend for Mock {
    fn vram_read(&mut self, address: GuestVramAddr, data: &mut [u8]) -> Result<(), Denied> {
        let range = self.range(address.0, data.len(), VRAM).expect("the address is outside VRAM");
        data.copy_from_slice(&self.vram[range]);
        Ok(())
    }

    fn vram_write(&mut self, address: GuestVramAddr, data: &[u8]) -> Result<(), WriteFailure> {
        self.memory()?;
        let range = self.range(address.0, data.len(), VRAM).expect("the address is outside VRAM");
        self.vram[range].copy_from_slice(data);
        Ok(())
    }

    fn aperture_read(&mut self, _: Aperture, offset: u64, data: &mut [u8]) -> Result<(), Denied> {
        let range = self.range(offset, data.len(), VRAM / 2)?;
        data.copy_from_slice(&self.vram[range]);
        Ok(())
    }

    fn aperture_write(&mut self, _: Aperture, offset: u64, data: &[u8]) -> Result<(), WriteFailure> {
        self.memory()?;
        let range = self.range(offset, data.len(), VRAM / 2)?;
        self.vram[range].copy_from_slice(data);
        Ok(())
    }

    fn bind_aperture(&mut self, aperture: Aperture, instance: Option<Place>) {
        self.calls.push(Call::BindAperture(aperture, instance));
    }

    fn place_window(&mut self, base: Option<GuestVramAddr>) {
        self.calls.push(Call::PlaceWindow(base));
    }

    fn flush_tlb(&mut self, directory: Option<Place>, hub_only: bool) {
        self.calls.push(Call::FlushTlb(directory, hub_only));
    }

    fn flush_apertures(&mut self) {
        self.calls.push(Call::FlushApertures);
    }

    fn bind_channel(&mut self, channel: VirtualChannelId, instance: Option<Place>) {
        self.calls.push(Call::Bind(channel.0, instance));
    }

    fn enable_channel(&mut self, channel: VirtualChannelId, enabled: bool) {
        self.calls.push(Call::Enable(channel.0, enabled));
    }

    fn channel_state(&mut self, _: VirtualChannelId) -> ChannelState {
        self.channel
    }

    fn submit_runlist(&mut self, list: Place, length: u32) {
        self.calls.push(Call::Runlist(list, length));
    }

    fn preempt(&mut self, channel: VirtualChannelId) {
        self.calls.push(Call::Preempt(channel.0));
    }

    fn preempting(&mut self, _: VirtualChannelId) -> bool {
        self.preempting
    }

    fn engine_status(&mut self, _: u32) -> EngineStatus {
        self.engine
    }

    fn block_engines(&mut self, engines: u32, blocked: bool) {
        self.calls.push(Call::Block(engines, blocked));
    }

    fn reset_engine(&mut self, engine: u32) {
        self.calls.push(Call::ResetEngine(engine));
    }

    fn reset_fifo(&mut self) {
        self.calls.push(Call::ResetFifo);
    }

    fn now_ns(&mut self) -> u64 {
        self.now += 32;
        self.now
    }

    fn interrupt(&mut self, line: InterruptLine) {
        self.calls.push(Call::Interrupt(line));
    }

    fn bus_master(&mut self, enabled: bool) {
        self.calls.push(Call::BusMaster(enabled));
    }
}

/// A vGPU with [`VRAM`] bytes of VRAM and a VBIOS with a valid signature, and a mock mediator.
pub struct Rig {
    pub gpu: VGpu,
    pub mock: Mock,
}

impl Rig {
    pub fn new() -> Self {
        Self::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut VGpuConfig)) -> Self {
        let mut config = VGpuConfig::of_chip(&GF100, VRAM, Arc::from([0x55, 0xaa, 0x02, 0x00, 0x11, 0x22]));
        change(&mut config);
        Self { gpu: VGpu::new(config).expect("the configuration is invalid"), mock: Mock::default() }
    }

    pub fn rd(&mut self, offset: u32) -> u32 {
        self.gpu.bar0_read32(offset, &mut self.mock)
    }

    pub fn wr(&mut self, offset: u32, value: u32) {
        self.gpu.bar0_write32(offset, value, &mut self.mock);
    }

    /// Replaces the bits selected by `mask` in a register, as a driver does. Returns the previous value.
    pub fn mask(&mut self, offset: u32, mask: u32, value: u32) -> u32 {
        let old = self.rd(offset);
        self.wr(offset, (old & !mask) | value);
        old
    }

    pub fn wr8(&mut self, offset: u64, value: u8) {
        self.gpu.bar0_write(offset, &[value], &mut self.mock).unwrap();
    }

    pub fn config(&mut self, offset: u64, data: &[u8]) {
        self.gpu.config_write(offset, data, &mut self.mock);
    }

    /// Enables MSI, the interrupt line, and all PFIFO interrupts.
    pub fn enable_msi(&mut self) {
        self.config(0x6a, &[1, 0]);
        self.wr(nvspec::regs::pfifo::INTR_EN::OFFSET, u32::MAX);
        self.wr(nvspec::regs::pmc::INTR_EN_0::OFFSET, 1);
        self.mock.take();
    }

    /// Returns the denied accesses, each in the form "site: reason".
    pub fn denied(&self) -> Vec<String> {
        self.gpu.denials().iter().map(|(site, reason, _)| format!("{site}: {reason}")).collect()
    }
}
