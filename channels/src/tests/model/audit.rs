//! Checks the invariants that always hold, and the final state after all work has completed.

use super::super::fake::{A, B, LAYOUT, World};
use super::{Rig, Track, clean};
use crate::{RunState, work_va};
use nvspec::addr::VramAddr;
use nvspec::fifo::{ChannelId, VirtualChannelId};
use nvspec::instance::{ramfc, userd};
use nvspec::regs::pfifo;
use std::collections::BTreeSet;

impl Rig {
    /// Checks the invariants that always hold.
    pub(crate) fn check(&mut self) {
        for ((vm, channel), track) in &self.tracks {
            let (vm, channel, physical) = (*vm, VirtualChannelId(*channel), track.physical);
            let world = &mut self.world;
            assert_eq!(world.channels.by_physical(physical), Some((vm, channel)));
            assert_eq!(world.channels.physical(vm, channel), Some(physical));
            let block = LAYOUT.instance(physical).0;
            assert_eq!(world.card.bound(physical), 0xc000_0000 | (block >> 12) as u32);
            let ring = work_va(physical).0;
            let expected = [
                (ramfc::USERD_LO, LAYOUT.userd(physical).0 as u32),
                (ramfc::GP_BASE_LO, ring as u32),
                (ramfc::GP_BASE_HI, 9 << 16 | (ring >> 32) as u32),
                (0x200, World::directory_of(vm).0 as u32),
                (0x208, u32::MAX),
                (0x20c, 0xff),
            ];
            for (offset, value) in expected {
                assert_eq!(world.card.block_word(physical, offset), value);
            }
            let running = world.channels.run_state(physical) == RunState::Running;
            assert_eq!(world.card.enabled(physical), running);
            assert_eq!(
                world.card.userd(physical, userd::GP_PUT),
                track.index(track.started),
                "GP_PUT covers the started submissions"
            );
            // The card has received the contents of the guest's ring in order, and the guest sees its own progress.
            let given = &world.card.units[&physical.0].given;
            assert_eq!(given[..], track.taken[..given.len()]);
            let get = (track.start + given.len() as u32) & (track.entries - 1);
            assert_eq!(world.userd(vm, channel.0, userd::GP_GET), get);
            assert_eq!(world.userd(vm, channel.0, userd::GP_PUT), track.gp_put);
            let range = u64::from(world.userd(vm, channel.0, userd::GET_HI)) << 32
                | u64::from(world.userd(vm, channel.0, userd::GET));
            assert!(range <= 0xff_f800_0000, "no host address is shown");
            for index in world.card.unfetched(physical) {
                let raw = world.card.ring_entry(physical, index);
                let own = raw >> 42 == 6 && raw & 0xff_ffff_fffc >= ring && raw & 0xff_ffff_fffc < ring + 0x3000;
                assert!(own || clean(raw) == Some(raw), "entry {index}: {raw:#x}");
            }
        }
        for index in 0..128 {
            let physical = ChannelId(index);
            let owned = self.tracks.values().any(|track| track.physical == physical);
            let expected = match self.world.channels.run_state(physical) {
                RunState::Free => !owned && !self.stuck.contains(&physical),
                RunState::Stopped | RunState::Running => owned,
                RunState::Stuck => self.stuck.contains(&physical),
            };
            assert!(expected, "channel {index} is leaked or has no owner");
            if !owned {
                assert_eq!(self.world.card.bound(physical), 0);
            }
        }
        let list = self.world.card.runlist();
        let unique: BTreeSet<u32> = list.iter().copied().collect();
        assert_eq!(unique.len(), list.len());
        assert!(list.iter().all(|id| self.tracks.values().any(|track| u32::from(track.physical.0) == *id)));
    }

    /// Lets all work complete, and checks that each submission ends exactly once.
    pub(crate) fn drain(&mut self) {
        self.world.card.hung.clear();
        for vm in [A, B] {
            self.world.channels.pause(&mut self.world.card, vm, crate::Pause::Guest, false);
            let list: Vec<u8> = self.tracks.keys().filter(|(owner, _)| *owner == vm).map(|(_, id)| *id).collect();
            for channel in &list {
                self.world.enable(vm, *channel, true);
            }
            self.world.list(vm, &list);
        }
        // 16 rounds suffice: guests' rings have at most 1024 entries unless a block specifies another size, and the
        // host's ring has 512 entries.
        self.gated = false;
        for _ in 0..16 {
            while !self.waiting.is_empty() {
                self.start(0);
            }
            self.pull_pending();
            for physical in self.tracks.values().map(|track| track.physical).collect::<Vec<_>>() {
                self.world.card.run(physical);
            }
            self.completed();
            self.check();
        }
        for ((vm, channel), track) in &self.tracks {
            let id = VirtualChannelId(*channel);
            assert_eq!(self.world.channels.in_flight(*vm, id), 0, "every submission ends");
            if track.entries <= 1024 && !track.faulted {
                assert_eq!(self.world.channels.backlog(*vm, id), 0);
            }
            let given = self.world.card.units[&track.physical.0].given.len();
            assert_eq!(given, track.taken.len());
        }
        self.non_stall(pfifo::ENGINE_STATUS::COUNT - 1);
        let working = self.world.channels.at_work(&mut self.world.card, 0);
        assert!(working.is_empty() && self.world.channels.news(0).is_empty(), "nothing has happened since");
        let idle = |track: &Track| track.faulted || track.entries <= 1024;
        if self.tracks.values().all(idle) {
            for vm in [A, B] {
                assert!(!self.world.channels.busy_directory(&mut self.world.card, World::directory_of(vm)));
            }
        }
        assert!(!self.world.channels.uses_directory(VramAddr(1)));
    }
}
