//! Rules that hold after any sequence of operations, checked against an independent model of the guest's rings, the
//! entries pulled from them, and the fake card's observations. The property tests and the fuzz target use this model.

mod audit;

use super::fake::{A, B, LAYOUT, World};
use crate::{
    Bind, Channels, Completion, Doorbell, DoorbellError, GuestInstance, Parts, Place, PullError, Pulled, RingFault,
    Stuck, Submission, TenantId, work_va,
};
use nvspec::addr::GuestVramAddr;
use nvspec::fifo::{self, ChannelId, VirtualChannelId};
use nvspec::instance::{ramfc, userd};
use std::collections::{BTreeMap, BTreeSet};

/// An action by a guest, the card or the host. The first `bool` selects the VM, and the first `u8` selects the channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Binds a channel with the given values in the guest's block: ring size, GP_GET, and GP_PUT.
    Bind(bool, u8, u8, u16, u16),
    /// Binds a channel with the given bytes as its block.
    BindBytes(bool, u8, Vec<u8>),
    Unbind(bool, u8),
    Enable(bool, u8, bool),
    List(bool, Vec<u8>),
    Preempt(bool, u8),
    Pause(bool, bool),
    Refuse(bool, u8),
    /// Writes GP_PUT. The doorbell is pulled immediately or later, depending on the flag.
    Ring(bool, u8, u32, bool),
    /// Delivers one of the stored doorbells, selected by this number.
    Pull(u8),
    /// Determines whether submissions wait until they are started.
    Gate(bool),
    /// Starts one of the waiting submissions, selected by this number, together with earlier submissions of its
    /// channel.
    Start(u8),
    /// Runs the pending pulls.
    Pending,
    /// Writes an entry of the guest's ring, given by index and value.
    Write(bool, u8, u16, u64),
    Unmap(bool, u8, bool),
    /// Makes the card fetch up to this number of entries.
    Fetch(bool, u8, u8),
    Execute(bool, u8, u8),
    Forge(bool, u8, u8, u32),
    Swallow(bool, u8),
    Completed,
    NonStall(u8),
    Look(u64),
    Hang(bool, u8),
    LetGo,
    Destroy(bool),
    Reset,
    /// Saves and restores the channels.
    Restore,
}

/// State of a bound channel in the model.
#[derive(Debug)]
struct Track {
    physical: ChannelId,
    ring: u64,
    entries: u32,
    start: u32,
    gp_put: u32,
    /// Number of doorbells so far.
    rung: u64,
    /// Guest ring index up to which entries may be pulled, and the number of the doorbell that permitted it.
    allowed: (u32, u64),
    /// Entries that the card should receive, in order.
    taken: Vec<u64>,
    /// Number of entries in each submission, and the length of `taken` after it.
    submissions: Vec<(u32, usize)>,
    /// Number of submissions that the card may fetch.
    started: usize,
    completed: u32,
    faulted: bool,
    /// False if the guest has tampered with records.
    honest: bool,
}

impl Track {
    /// Returns the host ring index after the given number of submissions.
    fn index(&self, submissions: usize) -> u32 {
        let taken = self.submissions.get(submissions.wrapping_sub(1)).map_or(0, |(_, taken)| *taken);
        ((taken + submissions) % 512) as u32
    }
}

pub(crate) struct Rig {
    world: World,
    tracks: BTreeMap<(TenantId, u8), Track>,
    /// Doorbells to be pulled later, each with its number within its channel.
    kept: Vec<(Doorbell, u64)>,
    gated: bool,
    /// Submissions that wait to be started, each with its channel, the serial number of its binding, and its number
    /// within the binding.
    waiting: Vec<((TenantId, u8), u64, usize, Submission)>,
    stuck: BTreeSet<ChannelId>,
    /// Serial number of each channel's last binding.
    serials: BTreeMap<(TenantId, u8), u64>,
    refused: BTreeMap<(TenantId, u8), bool>,
    /// VMs that may be notified because work was in flight or has ended since the last notification.
    worked: BTreeSet<TenantId>,
}

const MAX_CHANNELS_PER_VM: usize = 4;

fn vm_of(second: bool) -> TenantId {
    if second { B } else { A }
}

/// Returns the part of a ring entry that may reach the card, or `None` if the entry is rejected. The bit positions are
/// those in the class header.
fn clean(raw: u64) -> Option<u64> {
    let (address, dwords) = (raw & 0xff_ffff_fffc, raw >> 42 & 0x1f_ffff);
    match dwords {
        0 => (raw >> 32 & 0xff == 0).then_some(0),
        _ => (address + 4 * dwords <= 0xff_f800_0000).then_some(raw & !(1 << 40 | 3)),
    }
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self {
            world: World::new(),
            tracks: BTreeMap::new(),
            kept: Vec::new(),
            gated: false,
            waiting: Vec::new(),
            stuck: BTreeSet::new(),
            serials: BTreeMap::new(),
            refused: BTreeMap::new(),
            worked: BTreeSet::new(),
        }
    }

    fn physical(&self, vm: TenantId, channel: u8) -> Option<ChannelId> {
        self.tracks.get(&(vm, channel)).map(|track| track.physical)
    }

    pub(crate) fn apply(&mut self, op: &Op) {
        self.world.now += 1;
        let World { channels, card, guest, .. } = &mut self.world;
        match *op {
            Op::Bind(second, channel, log2, gp_get, gp_put) => {
                let (vm, at) = (vm_of(second), World::instance_of(channel));
                guest.instance(at, World::userd_of(channel));
                let ring = World::ring_of(vm, channel);
                guest.put(at + ramfc::GP_BASE_LO, ring as u32);
                guest.put(at + ramfc::GP_BASE_HI, u32::from(log2 % 11) << 16 | (ring >> 32) as u32);
                guest.put(at + ramfc::GP_GET, gp_get.into());
                guest.put(at + ramfc::GP_PUT, gp_put.into());
                let block = guest.bytes(at);
                self.bind(vm, channel, &block);
            }
            Op::BindBytes(second, channel, ref bytes) => {
                let mut block = [0; 4096];
                let len = bytes.len().min(block.len());
                block[..len].copy_from_slice(&bytes[..len]);
                self.bind(vm_of(second), channel, &block);
            }
            Op::Unbind(second, channel) => self.unbind(vm_of(second), channel),
            Op::Enable(second, channel, on) => {
                let bound = channels.enable(&mut Parts { card, guest }, vm_of(second), VirtualChannelId(channel), on);
                assert_eq!(bound, self.tracks.contains_key(&(vm_of(second), channel)));
            }
            Op::List(second, ref list) => {
                self.world.list(vm_of(second), list);
            }
            Op::Preempt(second, channel) => {
                let id = VirtualChannelId(channel);
                channels.preempt(&mut Parts { card, guest }, vm_of(second), id);
                // A preemption may stay pending only while a channel hangs.
                let under_way = channels.preempting(card, vm_of(second), id);
                assert!(!under_way || !self.world.card.hung.is_empty());
                assert!(under_way || self.hung(vm_of(second), channel).is_none());
            }
            Op::Pause(second, on) => channels.pause(card, vm_of(second), crate::Pause::Guest, on),
            Op::Refuse(second, channel) => {
                let instance = Place::Vram(GuestVramAddr(World::instance_of(channel)));
                channels.refuse(vm_of(second), VirtualChannelId(channel), instance, None);
                if channel < 128 && !self.tracks.contains_key(&(vm_of(second), channel)) {
                    self.refused.insert((vm_of(second), channel), false);
                }
            }
            Op::Ring(second, channel, gp_put, now) => self.ring(vm_of(second), channel, gp_put, now),
            Op::Pull(which) => {
                if !self.kept.is_empty() {
                    let (doorbell, number) = self.kept.swap_remove(usize::from(which) % self.kept.len());
                    self.pull(doorbell, number);
                }
            }
            Op::Gate(on) => self.gated = on,
            Op::Start(which) => {
                if !self.waiting.is_empty() {
                    self.start(usize::from(which) % self.waiting.len());
                }
            }
            Op::Pending => self.pull_pending(),
            Op::Write(second, channel, index, raw) => {
                let at = World::ring_of(vm_of(second), channel) + 8 * u64::from(index % 1024);
                guest.entries.insert(at, raw);
            }
            Op::Unmap(second, channel, gone) => {
                let page = World::ring_of(vm_of(second), channel) / 4096;
                if gone {
                    guest.unmapped.insert(page)
                } else {
                    guest.unmapped.remove(&page)
                };
            }
            Op::Fetch(second, channel, count) => {
                if let Some(physical) = self.physical(vm_of(second), channel) {
                    (0..count).take_while(|_| self.world.card.fetch(physical)).count();
                }
            }
            Op::Execute(second, channel, count) => {
                if let Some(physical) = self.physical(vm_of(second), channel) {
                    (0..count).take_while(|_| self.world.card.execute(physical)).count();
                }
            }
            Op::Forge(second, channel, slot, payload) => {
                if let Some(track) = self.tracks.get_mut(&(vm_of(second), channel)) {
                    track.honest = false;
                    // Half of the payloads are values that the host expects.
                    let likely = track.completed + 1 + payload % 4;
                    let (slot, payload) = if slot & 1 == 0 { (slot, payload) } else { ((likely - 1) as u8, likely) };
                    card.forge(track.physical, slot, payload);
                }
            }
            Op::Swallow(second, channel) => {
                if let Some(track) = self.tracks.get_mut(&(vm_of(second), channel)) {
                    track.honest = false;
                    card.units.get_mut(&track.physical.0).unwrap().swallow = true;
                }
            }
            Op::Completed => {
                self.completed();
            }
            Op::NonStall(engine) => self.non_stall(engine.into()),
            Op::Look(now) => {
                assert!(channels.look(card, now).is_empty(), "no engine is busy");
            }
            Op::Hang(second, channel) => {
                if let Some(physical) = self.physical(vm_of(second), channel) {
                    self.world.card.hung.insert(physical.0);
                }
            }
            Op::LetGo => {
                card.hung.clear();
                for physical in std::mem::take(&mut self.stuck) {
                    assert!(channels.let_go(card, physical));
                }
            }
            Op::Restore => {
                let saved = channels.save();
                *channels = Channels::restored(saved.clone(), LAYOUT).expect("the saved channels are valid");
                assert_eq!(channels.save(), saved);
            }
            Op::Destroy(second) => self.destroy(vm_of(second)),
            Op::Reset => {
                card.reset();
                channels.card_reset();
                self.tracks.clear();
                self.refused.clear();
                self.stuck.clear();
            }
        }
    }

    fn bind(&mut self, vm: TenantId, channel: u8, block: &[u8; 4096]) {
        let Ok(guest) = GuestInstance::parse(block) else {
            return;
        };
        let World { channels, card, .. } = &mut self.world;
        let known = self.tracks.contains_key(&(vm, channel));
        let before = self.tracks.keys().filter(|(owner, _)| *owner == vm).count();
        let instance = Place::Vram(GuestVramAddr(World::instance_of(channel)));
        let bind = Bind { instance, guest: &guest, directory: World::directory_of(vm) };
        let result = channels.bind(card, vm, VirtualChannelId(channel), bind);
        if channel < 128 {
            self.forget(vm, channel, result.err() == self.hung(vm, channel).map(Into::into));
        }
        match result {
            Ok(physical) => {
                assert!(channel < 128 && before - usize::from(known) < MAX_CHANNELS_PER_VM);
                let entries = 1 << guest.gp_entries_log2;
                let start = if guest.gp_get < entries { guest.gp_get } else { 0 };
                let gp_put = if guest.gp_put < entries { guest.gp_put } else { start };
                let track = Track {
                    physical,
                    ring: guest.gp_base.0,
                    entries,
                    start,
                    gp_put,
                    rung: 0,
                    allowed: (gp_put, 0),
                    taken: Vec::new(),
                    submissions: Vec::new(),
                    started: 0,
                    completed: 0,
                    faulted: false,
                    honest: true,
                };
                assert!(self.tracks.insert((vm, channel), track).is_none());
                for other in self.tracks.iter().filter(|(key, _)| **key != (vm, channel)).map(|(_, track)| track) {
                    assert_ne!(other.physical, physical, "a physical channel has one owner");
                }
                assert!(!self.stuck.contains(&physical));
                let bound = self.world.channels.bound(physical).unwrap();
                assert!(self.serials.insert((vm, channel), bound.serial).is_none_or(|old| old < bound.serial));
            }
            Err(crate::BindError::Cap { .. }) => assert!(before >= MAX_CHANNELS_PER_VM && !known),
            Err(crate::BindError::NoSuchChannel) => assert!(channel >= 128),
            Err(crate::BindError::Stuck(stuck)) => assert!(self.stuck.contains(&stuck.channel)),
            Err(crate::BindError::Full) => assert!(self.stuck.len() + self.tracks.len() >= 128),
            Err(crate::BindError::NoSuchVm) => panic!("both VMs exist"),
        }
    }

    fn hung(&self, vm: TenantId, channel: u8) -> Option<Stuck> {
        let physical = self.physical(vm, channel)?;
        self.world.card.hung.contains(&physical.0).then_some(Stuck { channel: physical })
    }

    /// Records that the channel is no longer bound.
    fn forget(&mut self, vm: TenantId, channel: u8, as_expected: bool) {
        self.refused.remove(&(vm, channel));
        if let Some(stuck) = self.hung(vm, channel) {
            assert!(as_expected);
            self.stuck.insert(stuck.channel);
        }
        self.tracks.remove(&(vm, channel));
    }

    fn unbind(&mut self, vm: TenantId, channel: u8) {
        let World { channels, card, .. } = &mut self.world;
        let words = channels.saved_words(card, vm, VirtualChannelId(channel));
        let result = channels.unbind(card, vm, VirtualChannelId(channel));
        let hung = self.hung(vm, channel);
        assert_eq!(result.err(), hung);
        if let Some(track) = self.tracks.get(&(vm, channel)) {
            let saved = self.world.channels.saved_words(&mut self.world.card, vm, VirtualChannelId(channel));
            assert_eq!(saved, words);
            let put = track.gp_put;
            assert_eq!(saved.unwrap()[2], (ramfc::GP_PUT, put));
        }
        self.forget(vm, channel, true);
    }

    fn destroy(&mut self, vm: TenantId) {
        let World { channels, card, .. } = &mut self.world;
        let stuck: BTreeSet<ChannelId> = channels.destroy_vm(card, vm).into_iter().map(|stuck| stuck.channel).collect();
        let gone: Vec<_> = self.tracks.keys().filter(|(owner, _)| *owner == vm).copied().collect();
        for (_, channel) in gone {
            let hung = self.hung(vm, channel);
            assert!(hung.is_none_or(|hung| stuck.contains(&hung.channel)));
            self.forget(vm, channel, true);
        }
        self.refused.retain(|(owner, _), _| *owner != vm);
        self.worked.remove(&vm);
        self.world.channels.add_vm(vm, MAX_CHANNELS_PER_VM as u32);
    }

    fn ring(&mut self, vm: TenantId, channel: u8, gp_put: u32, now: bool) {
        let result = self.world.check(vm, channel, gp_put);
        if let Some(told) = self.refused.get_mut(&(vm, channel)) {
            let expected = if *told { DoorbellError::Unbound } else { DoorbellError::Refused };
            assert_eq!(result, Err(expected));
            *told = true;
            return;
        }
        match self.tracks.get_mut(&(vm, channel)) {
            None => assert_eq!(result, Err(DoorbellError::Unbound)),
            Some(track) if gp_put >= track.entries => {
                assert_eq!(result, Err(DoorbellError::BeyondRing { gp_put, entries: track.entries }));
            }
            Some(track) => {
                track.gp_put = gp_put;
                track.rung += 1;
                let number = track.rung;
                let doorbell = result.unwrap();
                assert_eq!(doorbell.channel, track.physical);
                if now {
                    self.pull(doorbell, number);
                } else {
                    self.kept.push((doorbell, number));
                }
            }
        }
    }

    fn pull_pending(&mut self) {
        for doorbell in self.world.channels.pending_pull() {
            let backlog = self.world.channels.backlog(doorbell.vm, doorbell.virtual_channel);
            let pulled = self.pull(doorbell, 0);
            assert!(
                backlog > 0 && pulled.is_none_or(|pulled| pulled.taken > 0),
                "a channel without entries to pull is pending"
            );
        }
    }

    /// Pulls a doorbell. Returns `None` if the channel's ring is faulted.
    fn pull(&mut self, doorbell: Doorbell, number: u64) -> Option<Pulled> {
        let key = (doorbell.vm, doorbell.virtual_channel.0);
        let before = self.world.channels.in_flight(doorbell.vm, doorbell.virtual_channel);
        let put = self.tracks.get(&key).map_or(0, |track| track.index(track.submissions.len()));
        let given = self.world.card.userd(doorbell.channel, userd::GP_PUT);
        let unfetched = self.world.card.unfetched(doorbell.channel).len() as u32 + (put + 512 - given) % 512;
        let result = self.world.stage(doorbell);
        assert_eq!(
            self.world.card.userd(doorbell.channel, userd::GP_PUT),
            given,
            "the card must not receive the entries yet"
        );
        let after = self.world.channels.in_flight(doorbell.vm, doorbell.virtual_channel);
        let Some(track) = self.tracks.get_mut(&key).filter(|track| track.physical == doorbell.channel) else {
            assert_eq!(result, Ok(Pulled::default()));
            return result.ok();
        };
        // A doorbell for an earlier binding of the same channel has no effect, because its serial number differs.
        let stale = number > track.rung || doorbell.serial != self.serials[&key];
        if stale {
            assert_eq!(result, Ok(Pulled::default()));
            return result.ok();
        }
        if number > track.allowed.1 {
            track.allowed = (doorbell.gp_put, number);
        }
        let next = track.start + track.taken.len() as u32;
        let wanted = track.allowed.0.wrapping_sub(next) & (track.entries - 1);
        let room = if before >= 256 { 0 } else { 510u32.saturating_sub(unfetched) };
        // Read the newly pulled entries from the host's own ring.
        let end = self.world.channels.bound(track.physical).unwrap().ring.host_index();
        let given: Vec<u64> = (put..put + (end + 512 - put) % 512)
            .map(|index| self.world.card.ring_entry(track.physical, index % 512))
            .collect();
        assert_eq!(u32::from(!given.is_empty()), after - before, "a pull makes at most one submission");
        let count = given.len().saturating_sub(1);
        if let Some((record, entries)) = given.split_last() {
            assert!(!entries.is_empty());
            let at = work_va(track.physical).0;
            let address = record & 0xff_ffff_fffc;
            assert!((at + 0x1000..at + 0x3000).contains(&address) && address % 32 == 0);
            assert_eq!(record & !0xff_ffff_fffc, 6 << 42 | 1 << 41);
            // Each entry must be the guest's next one.
            for raw in entries {
                let index = (track.start + track.taken.len() as u32) & (track.entries - 1);
                let guest = self.world.guest.entry(track.ring + 8 * u64::from(index));
                assert_eq!(Some(*raw), clean(guest));
                track.taken.push(*raw);
            }
            track.submissions.push((entries.len() as u32, track.taken.len()));
            self.worked.insert(doorbell.vm);
            let submission = result.unwrap_or_else(|error| error.pulled).submission.expect("a submission was pulled");
            assert!(self.waiting.iter().all(|(.., other)| *other != submission));
            self.waiting.push((key, doorbell.serial, track.submissions.len(), submission));
        }
        let taken = result.unwrap_or_else(|error| error.pulled);
        assert_eq!((taken.taken as usize, taken.submission.is_some()), (count, count > 0));
        let outcome = match result {
            Ok(pulled) => {
                assert_eq!((pulled.taken, pulled.left), (wanted.min(room), wanted - wanted.min(room)));
                assert!(!track.faulted);
                Some(pulled)
            }
            Err(PullError { fault, .. }) => {
                let index = (track.start + track.taken.len() as u32) & (track.entries - 1);
                let va = track.ring + 8 * u64::from(index);
                if !track.faulted {
                    match fault {
                        RingFault::Unmapped { va: at } => {
                            assert_eq!(at.0, va);
                            assert!(va >= 0xff_f800_0000 || self.world.guest.unmapped.contains(&(va / 4096)));
                        }
                        RingFault::Entry { index: at, raw } => {
                            assert_eq!((at, raw), (index, self.world.guest.entry(va)));
                            assert_eq!(clean(raw), None);
                        }
                    }
                }
                track.faulted = true;
                None
            }
        };
        if !self.gated && count > 0 {
            self.start(self.waiting.len() - 1);
        }
        outcome
    }

    /// Starts a submission that waits.
    fn start(&mut self, at: usize) {
        let (key, serial, number, submission) = self.waiting.swap_remove(at);
        let World { channels, card, .. } = &mut self.world;
        let track = self.tracks.get_mut(&key).filter(|_| self.serials[&key] == serial);
        let physical = track.as_ref().map_or(ChannelId((submission.0 % 128) as u8), |track| track.physical);
        let started = channels.start(card, physical, submission);
        let Some(track) = track else { return assert!(!started, "a submission of an ended binding cannot start") };
        assert_eq!(started, number > track.started);
        track.started = track.started.max(number);
    }

    fn completed(&mut self) -> Vec<Completion> {
        let completions = self.world.completed();
        for completion in &completions {
            let key = (completion.vm, completion.channel.0);
            let track = self.tracks.get_mut(&key).expect("the channel is bound");
            assert_eq!(completion.physical, track.physical);
            assert_eq!(completion.sequence, track.completed + 1, "completions are in order and not repeated");
            track.completed += 1;
            let (entries, _) = track.submissions[track.completed as usize - 1];
            assert_eq!(completion.entries, entries);
            assert_eq!(completion.completed_at, self.world.now);
            assert!(track.started >= track.completed as usize, "a completed submission was started");
            let unit = &self.world.card.units[&track.physical.0];
            assert!(unit.records >= completion.sequence, "the card has fetched its record");
            if track.honest {
                assert!(unit.released.contains(&completion.sequence));
                assert!(completion.card_time_ns.is_some_and(|time| time > 0 && time <= self.world.card.time));
            }
        }
        for ((vm, channel), track) in &self.tracks {
            let left = self.world.channels.in_flight(*vm, VirtualChannelId(*channel));
            assert_eq!(left as usize, track.submissions.len() - track.completed as usize);
            let released = &self.world.card.units[&track.physical.0].released;
            if track.honest {
                assert_eq!(released.last().copied().unwrap_or(0), track.completed, "released submissions are complete");
            }
        }
        completions
    }

    fn non_stall(&mut self, engine: u32) {
        let mut told = self.world.channels.at_work(&mut self.world.card, engine);
        self.completed();
        told.extend(self.world.channels.news(engine));
        assert!(told.is_subset(&self.worked), "a VM without work is notified");
        for vm in &told {
            let busy = self.tracks.iter().any(|((owner, channel), _)| {
                owner == vm && self.world.channels.in_flight(*owner, VirtualChannelId(*channel)) > 0
            });
            // An unknown engine ends no round: a VM with ended work is still notified for the known engines.
            if !busy && engine < fifo::engine::COUNT {
                self.worked.remove(vm);
            }
        }
        // Count the VMs with ended work that were not notified.
        let news = self.world.channels.vms.iter().filter(|(_, vm)| vm.news == 0x3f).count();
        assert!(engine >= fifo::engine::COUNT || news == 0, "no VM waits for an interrupt that was raised");
        // End the round of notifications.
        self.completed();
    }
}
