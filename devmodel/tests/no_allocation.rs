//! Checks that trapped accesses do not allocate memory: accesses to frequently used registers, to memory windows, and
//! to a register that was denied before.

#![expect(unsafe_code, reason = "the global allocator counts allocations")]
// UNSAFETY: `GlobalAlloc` is an unsafe trait. `alloc` counts its calls, and both functions call the system allocator.

use devmodel::{
    Aperture, Backend, ChannelState, Denied, EngineStatus, InterruptLine, Place, VGpu, VGpuConfig, WriteFailure,
};
use nvspec::addr::GuestVramAddr;
use nvspec::fifo::VirtualChannelId;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Number of allocations by this thread. Counted per thread, because the test harness has other threads.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: all requests are forwarded unchanged to `System`, which upholds the trait's contract. Counting does not
// allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: `System` has the same requirements for `layout` as this function, so the caller upholds them.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `alloc` above returned `pointer` for this `layout`, and obtained it from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A minimal mediator that accepts all requests.
#[derive(Default)]
struct Null {
    now: u64,
    rings: u64,
}

impl Backend for Null {
    fn vram_read(&mut self, _: GuestVramAddr, data: &mut [u8]) -> Result<(), Denied> {
        data.fill(0);
        Ok(())
    }
    fn vram_write(&mut self, _: GuestVramAddr, _: &[u8]) -> Result<(), WriteFailure> {
        Ok(())
    }
    fn aperture_read(&mut self, _: Aperture, _: u64, data: &mut [u8]) -> Result<(), Denied> {
        data.fill(0);
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
        self.now += 32;
        self.now
    }
    fn interrupt(&mut self, _: InterruptLine) {
        self.rings += 1;
    }
    fn bus_master(&mut self, _: bool) {}
}

/// Performs a typical round of driver work: submits a runlist, handles an interrupt, flushes the TLB, reads the time,
/// and accesses memory.
fn turn(gpu: &mut VGpu, null: &mut Null, round: u32) {
    let wr =
        |gpu: &mut VGpu, null: &mut Null, at: u64, value: u32| gpu.bar0_write(at, &value.to_le_bytes(), null).unwrap();
    let mut word = [0; 4];

    wr(gpu, null, 0x001700, round & 0xff);
    wr(gpu, null, 0x70_0000 + u64::from(round % 1000) * 4, round);
    gpu.aperture_write(Aperture::Bar1, 0x8c, &round.to_le_bytes(), null).unwrap();
    gpu.aperture_write(Aperture::Bar3, u64::from(round % 1000) * 8, &[0; 8], null).unwrap();
    wr(gpu, null, 0x070000, 1);
    gpu.bar0_read(0x070000, &mut word, null);
    wr(gpu, null, 0x100cb8, 0x10);
    wr(gpu, null, 0x100cbc, 0x8000_0001);
    gpu.bar0_read(0x100c80, &mut word, null);
    gpu.bar0_read(0x009400, &mut word, null);

    gpu.non_stall(0, null);
    gpu.runlist_done(null);
    wr(gpu, null, 0x000140, 0);
    gpu.bar0_write(0x088704, &[0xff], null).unwrap();
    gpu.bar0_read(0x000100, &mut word, null);
    wr(gpu, null, 0x0025a8, 1);
    wr(gpu, null, 0x002a00, 0x1000_0000);
    wr(gpu, null, 0x000140, 1);

    wr(gpu, null, 0x003000, 0xc000_0001);
    wr(gpu, null, 0x003004, 0x001f_0001);
    wr(gpu, null, 0x002274, 0x01f0_0001);
    gpu.ctxsw_timeout(0, VirtualChannelId(0), null);
    gpu.bar0_read(0x002640, &mut word, null);
    wr(gpu, null, 0x002100, 0x100);
    wr(gpu, null, 0x002634, 0);
    wr(gpu, null, 0x419848, round);
    // Access the same denied register again.
    gpu.bar0_read(0x06000c, &mut word, null);
}

#[test]
fn a_hundred_thousand_accesses_allocate_nothing() {
    let config = VGpuConfig::of_chip(&nvspec::chip::GF100, 256 << 20, vec![0; 1024].into());
    let mut gpu = VGpu::new(config).expect("the configuration is invalid");
    let mut null = Null::default();
    gpu.config_write(0x6a, &[1], &mut null);
    gpu.bar0_write(0x002140, &[0xff; 4], &mut null).unwrap();
    gpu.bar0_write(0x002628, &[1, 0, 0, 0], &mut null).unwrap();
    // The first round allocates the pages of stored registers, and logs the denied access.
    turn(&mut gpu, &mut null, 1);

    let before = ALLOCATIONS.get();
    for round in 2..=5001 {
        turn(&mut gpu, &mut null, round);
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert!(null.rings >= 5000, "the guest must receive an interrupt in each round: {}", null.rings);
}
