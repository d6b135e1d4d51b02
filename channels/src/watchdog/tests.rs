use super::*;
use crate::tests::fake::{A, B, World};
use crate::{HANG_LIMIT_NS, Watchdog};
use nvspec::fifo::VirtualChannelId;
use nvspec::instance::context;
use nvspec::regs::pfifo;

const LIMIT_NS: u64 = HANG_LIMIT_NS;

fn work(world: &mut World, unit: u32, physical: Option<ChannelId>) {
    let status = physical.map_or(0, |physical| 1 << 31 | u32::from(physical.0));
    world.card.registers.insert(pfifo::ENGINE_STATUS::at(unit), status);
}

fn look(world: &mut World, now: u64) -> Vec<Hang> {
    world.channels.look(&mut world.card, now)
}

#[test]
fn channel_without_progress_is_reported_once() {
    let mut world = World::new();
    world.bind(B, 0);
    let physical = world.run(A, 3);
    work(&mut world, 4, Some(physical));
    assert_eq!(look(&mut world, 1000), []);
    assert_eq!(look(&mut world, 1000 + LIMIT_NS), [], "the stall is not longer than permitted");
    let hang = Hang { engine: 4, vm: A, channel: VirtualChannelId(3), physical, for_ns: LIMIT_NS + 1 };
    assert_eq!(look(&mut world, 1001 + LIMIT_NS), [hang]);
    assert_eq!(look(&mut world, 2000 + 9 * LIMIT_NS), []);
    // The channel makes progress and stalls again.
    world.card.set_userd(physical, userd::GET, 4);
    assert_eq!(look(&mut world, 9 * LIMIT_NS + 3000), []);
    assert_eq!(look(&mut world, 10 * LIMIT_NS + 3001).len(), 1);
}

#[test]
fn channel_awaiting_semaphore_stalls_while_its_engine_works() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.card.registers.insert(pfifo::CHANNEL_STATE::at(physical.0.into()), CHANNEL_STATE::ACQUIRE_PENDING.mask() | 1);
    assert_eq!(
        (look(&mut world, 1000), look(&mut world, 1001 + LIMIT_NS)),
        (vec![], vec![]),
        "no engine is running the channel"
    );
    work(&mut world, 4, Some(physical));
    assert_eq!(look(&mut world, 2000 + LIMIT_NS), [], "the time starts when an engine runs the channel");
    assert_eq!(look(&mut world, 2001 + 2 * LIMIT_NS).len(), 1);
}

#[test]
fn any_progress_restarts_stall_timer() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    world.ring(A, 0, 1).unwrap();
    world.ring(A, 0, 2).unwrap();
    while world.card.fetch(physical) {}
    work(&mut world, 0, Some(physical));
    for now in 0..20 {
        // The channel makes progress once per half of the limit, either in a range (GET) or in the ring (GP_GET).
        match now % 3 {
            0 => world.card.set_userd(physical, userd::GET, now as u32),
            1 => world.card.set_userd(physical, userd::GP_GET, now as u32 % 2 + 2),
            _ => world.card.set_userd(physical, userd::GET, now as u32),
        }
        assert_eq!(look(&mut world, now * LIMIT_NS / 2), []);
    }
    world.card.set_userd(physical, userd::GP_GET, 4);
    assert_eq!(look(&mut world, 10 * LIMIT_NS), []);
    while world.card.execute(physical) {}
    let get = world.card.userd(physical, userd::GET);
    assert_eq!(look(&mut world, 11 * LIMIT_NS), []);
    work(&mut world, 0, None);
    assert_eq!(world.completed().len(), 2);
    work(&mut world, 0, Some(physical));
    assert_eq!(world.card.userd(physical, userd::GET), get);
    assert_eq!(look(&mut world, 12 * LIMIT_NS + 1), [], "two submissions have ended since");
}

#[test]
fn an_idle_engine_and_one_that_works_for_no_one_do_not_hang() {
    let mut world = World::new();
    let physical = world.run(A, 0);
    work(&mut world, 0, Some(physical));
    work(&mut world, 5, Some(ChannelId(100)));
    assert_eq!(look(&mut world, 0), []);
    work(&mut world, 0, None);
    assert_eq!(look(&mut world, LIMIT_NS), []);
    work(&mut world, 0, Some(physical));
    assert_eq!(look(&mut world, 2 * LIMIT_NS), []);
    assert_eq!(look(&mut world, 3 * LIMIT_NS), []);
}

#[test]
fn another_binding_of_the_same_channel_is_another() {
    let mut world = World::new();
    world.channels.add_vm(TenantId(3), 127);
    for channel in 0..127 {
        world.bind(TenantId(3), channel);
    }
    let physical = world.run(A, 0);
    work(&mut world, 0, Some(physical));
    assert_eq!(look(&mut world, 0), []);
    assert_eq!(world.run(A, 0), physical);
    assert_eq!(look(&mut world, 2 * LIMIT_NS), []);
}

#[test]
fn a_vm_has_its_own_limit() {
    let mut world = World::new();
    let (a, b) = (world.run(A, 0), world.run(B, 0));
    work(&mut world, 4, Some(a));
    work(&mut world, 5, Some(b));
    world.channels.set_hang_limit(A, Some(10));
    world.channels.set_hang_limit(B, None);
    world.channels.set_hang_limit(TenantId(9), Some(1));
    assert_eq!(look(&mut world, 0), []);
    let hangs = look(&mut world, 11);
    assert_eq!(hangs.iter().map(|hang| (hang.vm, hang.for_ns)).collect::<Vec<_>>(), [(A, 11)]);
    assert_eq!(look(&mut world, 100 * LIMIT_NS), [], "the VM has no limit");
}

#[test]
fn time_that_goes_back_is_no_time() {
    let mut watchdog = Watchdog::new(5);
    let signature = Signature { channel: ChannelId(1), serial: 1, gp_get: 0, get: 0, completed: 0 };
    assert_eq!(watchdog.limit_ns(), 5);
    assert_eq!(watchdog.sample(0, Some(signature), Some(5), 100), None);
    assert_eq!(watchdog.sample(0, Some(signature), Some(5), 50), None);
    assert_eq!(watchdog.sample(0, Some(signature), Some(5), 106), Some(6));
    assert_eq!(watchdog.sample(6, Some(signature), Some(5), 0), None, "engine 6 does not exist");
}

fn stalled(world: &mut World, now: u64) -> Vec<Stall> {
    world.channels.stalled(&mut world.card, now)
}

#[test]
fn stalled_channel_with_work_is_reported_once() {
    let mut world = World::new();
    let physical = world.run(A, 3);
    let idle = world.run(B, 0);
    world.ring(A, 3, 2).unwrap();
    world.card.set_userd(physical, userd::GET, 0x1230);
    assert_eq!(stalled(&mut world, 1000), []);
    assert_eq!(stalled(&mut world, 1000 + LIMIT_NS), []);
    let stall = Stall { vm: A, channel: VirtualChannelId(3), at: GpuVa(0x1230) };
    assert_eq!(stalled(&mut world, 1001 + LIMIT_NS), [stall]);
    assert_eq!(stalled(&mut world, 1000 + 9 * LIMIT_NS), [], "{idle:?} has no work");
}

#[test]
fn a_channel_that_waits_for_something_does_not_stand_still() {
    let mut world = World::new();
    let (a, b) = (world.run(A, 0), world.run(B, 0));
    world.ring(A, 0, 2).unwrap();
    let mut now = 0;
    let mut wait = |world: &mut World| {
        now += 2 * LIMIT_NS;
        stalled(world, now).len()
    };
    // The channel waits for an engine.
    work(&mut world, 4, Some(b));
    assert_eq!((wait(&mut world), wait(&mut world)), (0, 0));
    work(&mut world, 4, None);
    assert_eq!(wait(&mut world), 0);
    // The channel waits for a semaphore.
    world.card.registers.insert(pfifo::CHANNEL_STATE::at(a.0.into()), CHANNEL_STATE::ACQUIRE_PENDING.mask() | 1);
    assert_eq!((wait(&mut world), wait(&mut world)), (0, 0));
    world.card.registers.insert(pfifo::CHANNEL_STATE::at(a.0.into()), 1);
    assert_eq!(wait(&mut world), 0);
    // The channel waits for its guest to list and enable it.
    world.list(A, &[]);
    assert_eq!((wait(&mut world), wait(&mut world)), (0, 0));
    world.list(A, &[0]);
    assert_eq!(wait(&mut world), 0);
    world.enable(A, 0, false);
    assert_eq!((wait(&mut world), wait(&mut world)), (0, 0));
    world.enable(A, 0, true);
    assert_eq!((wait(&mut world), wait(&mut world)), (0, 1), "the channel no longer waits for anything");
}

#[test]
fn channel_waiting_for_admission_does_not_stall() {
    let mut world = World::new();
    world.guest.put(World::instance_of(0) + context::GR, 0x40_0000 | context::VALID);
    world.run(A, 0);
    world.ring(A, 0, 2).unwrap();
    let mut now = 0;
    for (admitted, stalls) in [(Some(B), [0, 0, 0]), (Some(A), [0, 1, 0])] {
        world.channels.admit(&mut world.card, admitted);
        let found = [0; 3].map(|_| {
            now += 2 * LIMIT_NS;
            stalled(&mut world, now).len()
        });
        assert_eq!(found, stalls, "with {admitted:?} admitted");
    }
}
