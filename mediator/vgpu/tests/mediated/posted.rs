//! Tests posted writes to host memory that are in flight when the memory changes owners.

use super::relocate::{driver_of, move_all, rig_of};
use super::{A, B, MIB, driver, rig};
use nvspec::class::compute90c0 as class;
use nvspec::fifo::VirtualChannelId;
use rig::driver::{At, Channel, Driver, M2MF, PAGE, m2mf_copy, methods, object};
use rig::{CHUNK, Rig};
use std::io::Read;
use vram::{GuestVramAddr, Lookup, Place, Step, TenantId, To};

const COMPUTE: (u32, u32) = (1, 0x90c0);
const CODE: u64 = 0x300_0000;
const TARGET: u64 = 0x500_0000;
/// Address of a semaphore that is never released.
const UNRELEASED_SEMAPHORE: u64 = 0x600_0000;
const VALUE: u32 = 0x5a5a_0001;

/// Runs a single-threaded kernel that stores [`VALUE`] at [`TARGET`]. Returns while the store is in flight, before the
/// channel's work ends.
fn store(rig: &Rig, driver: &mut Driver, channel: &mut Channel) {
    let source = format!(".kernel k\nMOV32I R0, {TARGET:#x}\nMOV32I R1, {VALUE:#x}\nST [R0], R1\nEXIT");
    let program = sm20::assemble(&source).expect("the source is valid");
    let code = driver.buffer(channel, CODE, 1, 0);
    driver.guest.vram_write(code, &program.bytes());
    driver.buffer(channel, A, 1, 1);
    let seen = driver.buffer(channel, B, 1, 2);
    driver.buffer(channel, UNRELEASED_SEMAPHORE, 1, 0);
    rig.card.hold_posted_writes(true);
    let kernel = &program.kernels[0];
    let words = [
        object(COMPUTE),
        methods(1, class::CODE_ADDRESS_HIGH, &[0, CODE as u32]),
        methods(1, class::PROGRAM_START, &[kernel.entry_offset]),
        methods(1, class::REGISTERS, &[kernel.registers.max(4)]),
        methods(1, class::BLOCK_YX, &[1 << 16 | 1, 1]),
        methods(1, class::GRID_YX, &[1 << 16 | 1, 1]),
        methods(1, class::LAUNCH, &[0]),
        object(M2MF),
        // This copy within card memory follows the kernel. It proves that the kernel has completed, but does not flush
        // other writes.
        m2mf_copy(A, B, PAGE as u32),
        methods(0, 0x10, &[0, UNRELEASED_SEMAPHORE as u32, 1, 1]),
    ];
    driver.submit(channel, &words.concat());
    let began = std::time::Instant::now();
    while !driver.vram_holds(seen, 1, 1) {
        assert!(began.elapsed() < std::time::Duration::from_secs(60), "the kernel ends");
        std::thread::yield_now();
    }
}

/// Maps a page of VRAM at [`TARGET`]. The page is at the start of a chunk of its own. Returns the page's address and
/// the chunk's number.
fn target_in_own_chunk(driver: &mut Driver, channel: &Channel) -> (u64, u32) {
    let (room, pages) = (driver.room(), CHUNK / PAGE);
    let next = driver.guest.vram_bytes - room;
    driver.vram((next.next_multiple_of(CHUNK) - next) / PAGE);
    let at = driver.vram(pages);
    driver.map(channel.space, TARGET, At::Vram(at), 1);
    (at, (at / CHUNK) as u32)
}

/// Moves chunk `index` of VM 0 to host memory: evicts all chunks, and then moves those with lower numbers back, because
/// the card may keep the first evicted chunk in its reserve.
fn send_out(rig: &Rig, at: u64, index: u32) {
    move_all(rig, 0, To::Host);
    let others = (0..index).map(|index| Step { vm: TenantId(0), index, to: To::Card }).collect::<Vec<_>>();
    rig.host.relocate(TenantId(0), &others);
    assert!(rig.in_host(0, at));
}

fn word(driver: &Driver, at: u64) -> u32 {
    let mut word = [0; 4];
    driver.guest.vram_read(at, &mut word);
    u32::from_le_bytes(word)
}

#[test]
fn ram_taken_back_by_vm_includes_earlier_posted_writes() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let mut channel = driver.channel(1);
    assert!(driver.guest.map_ram(16 * MIB, MIB, true));
    driver.map(channel.space, TARGET, At::Ram(16 * MIB), 1);
    store(&rig, &mut driver, &mut channel);
    assert_eq!(driver.guest.ram_word(16 * MIB), 0, "the store is in flight");
    let mut file = std::fs::File::from(driver.guest.unmap_ram(16 * MIB).expect("the memory was lent"));
    let mut word = [0; 4];
    file.read_exact(&mut word).expect("the RAM is readable");
    assert_eq!(u32::from_le_bytes(word), VALUE);
    rig.card.hold_posted_writes(false);
    assert_eq!(rig.card.counters().lost, 0);
}

#[test]
fn moved_chunk_includes_earlier_posted_writes() {
    let rig = rig_of(CHUNK, 64, 64);
    let mut driver = driver_of(&rig, 0, 32);
    let mut channel = driver.channel(1);
    let (at, index) = target_in_own_chunk(&mut driver, &channel);
    driver.guest.vram_write(at, &[1; PAGE as usize]);
    send_out(&rig, at, index);
    store(&rig, &mut driver, &mut channel);
    assert_eq!(word(&driver, at), 0x0101_0101, "the store is in flight");
    // Retire the mediator's channel, so that the CPU moves the chunk instead of the engines. The CPU's copy does not
    // flush posted writes.
    rig.host.lock().retire_channel(TenantId::MEDIATOR, VirtualChannelId(0)).expect("the channel has no work");
    assert_eq!(rig.host.relocate(TenantId(0), &[Step { vm: TenantId(0), index, to: To::Card }]).moved, 1);
    assert!(!rig.in_host(0, at));
    assert_eq!(word(&driver, at), VALUE);
}

#[test]
fn posted_writes_of_removed_vm_reach_no_other_vm() {
    let rig = rig_of(CHUNK, 64, 64);
    let mut gone = driver_of(&rig, 0, 16);
    let mut channel = gone.channel(1);
    let (at, index) = target_in_own_chunk(&mut gone, &channel);
    gone.guest.vram_write(at, &[1; PAGE as usize]);
    send_out(&rig, at, index);
    let found = rig.host.lock().vram().chunks.lookup(TenantId(0), GuestVramAddr(at), 1);
    let Lookup::Placed(Place::Host(slot_at)) = found else { panic!("{found:?}") };
    store(&rig, &mut gone, &mut channel);
    gone.guest.remove().expect("the VM can be removed");
    rig.host.scrub();
    // A write that is still in flight would arrive in a slot that may belong to another VM by now.
    rig.card.hold_posted_writes(false);
    let mut slot = [0; 4];
    rig.host.lock().vram().pinned.read(slot_at, &mut slot);
    assert_eq!(slot, [0; 4]);
}
