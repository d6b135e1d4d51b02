//! Checks a chunk table's invariants during and after its use.

use super::{CHUNK, CHUNKS, Flight, Model, start};
use crate::{GuestVramAddr, Lookup, Place, TenantId, Tier, To, VmSummary};
use proptest::prelude::*;

impl Model {
    /// Checks that each chunk has one owner, one place, and its VM's data, and that the totals are correct.
    pub(super) fn check(&self) -> Result<(), TestCaseError> {
        let owned = self.owned(Tier::Card).len() + self.owned(Tier::Host).len();
        let held = self.mediator() as usize + self.flights.len();
        prop_assert_eq!(
            self.vms.values().map(|vm| vm.chunks.len()).sum::<usize>() + held,
            owned,
            "a chunk or slot has two owners"
        );
        for (&id, vm) in &self.vms {
            for index in 0..vm.count() {
                let at = GuestVramAddr(u64::from(index) * CHUNK);
                let last = vm.bytes.min(at.0 + CHUNK) - 1;
                let whole = self.table.lookup(TenantId(id), at, last + 1 - at.0);
                let first = self.table.translate(TenantId(id), at);
                let Some(&(piece, token)) = vm.chunks.get(&index) else {
                    prop_assert_eq!((first, whole), (None, Lookup::Unplaced));
                    continue;
                };
                prop_assert_eq!(self.contents.get(&piece), Some(&token), "the VM's data is lost");
                prop_assert_eq!(
                    (first.map(|run| run.place), whole),
                    (Some(start(piece)), Lookup::Placed(start(piece)))
                );
                if let Place::Card(address) = start(piece) {
                    prop_assert_eq!(self.table.owner(address), Some((TenantId(id), at)));
                }
                prop_assert_eq!(self.table.is_parked(TenantId(id), index), vm.parked.contains(&index));
                let moving = |flight: &Flight| flight.alive && flight.vm == Some(id) && flight.index == index;
                prop_assert_eq!(self.table.is_moving(TenantId(id), index), self.flights.iter().any(moving));
            }
            prop_assert_eq!(self.table.lookup(TenantId(id), GuestVramAddr(vm.bytes), 1), Lookup::Outside);
        }
        let mut moves: Vec<_> =
            self.flights.iter().map(|flight| (flight.id, start(flight.from), start(flight.to))).collect();
        moves.sort();
        prop_assert_eq!(self.table.moves().map(|at| (at.id, at.from, at.to)).collect::<Vec<_>>(), moves);
        self.check_sums()
    }

    fn check_sums(&self) -> Result<(), TestCaseError> {
        let summary = self.table.summary();
        let accounts = self.vms.iter().map(|(&id, vm)| {
            let alive = |flight: &&Flight| flight.alive && flight.vm == Some(id);
            let (placed, host) = (vm.counted(Tier::Card), vm.placed(Tier::Host));
            let account = VmSummary {
                advertised: vm.count(),
                placed,
                parked: vm.parked.len() as u32,
                host,
                unbacked: vm.count() - vm.chunks.len() as u32,
                moving: self.flights.iter().filter(alive).count() as u32,
                limits: vm.limits,
                guarantee: vm.guarantee(),
                peak: vm.peaks[0],
                host_peak: vm.peaks[1],
                born_in_host: vm.born_in_host,
                moved_out: vm.moved[1],
                moved_in: vm.moved[0],
            };
            (TenantId(id), account)
        });
        prop_assert_eq!(&summary.vms, &accounts.collect());
        let to_card = self.flights.iter().filter(|flight| flight.to.0 == Tier::Card).count() as u32;
        prop_assert_eq!((summary.total, summary.free + summary.to_scrub), (CHUNKS, self.room(Tier::Card)));
        prop_assert_eq!((summary.mediator, summary.free), (self.mediator(), self.clean(Tier::Card)));
        prop_assert_eq!((summary.promised, summary.spare()), (self.promised(), self.spare()));
        prop_assert_eq!((summary.arriving, self.table.spare()), (to_card, self.spare()));
        prop_assert_eq!((summary.parked, summary.reserve), (self.parked(), self.left_reserve()));
        prop_assert_eq!(self.table.parked().count() as u32, self.parked());
        prop_assert_eq!(self.table.for_mediator(), self.for_mediator());
        prop_assert_eq!(self.table.borrowed(), self.borrowed);
        prop_assert_eq!(summary.set_aside, self.left_aside() + self.uncommitted() - self.spare());
        let placed: u32 = summary.vms.values().map(|vm| vm.placed + vm.parked).sum();
        prop_assert_eq!(summary.free + summary.to_scrub + summary.mediator + to_card + placed, CHUNKS);
        let (host, used) = (summary.host, self.owned(Tier::Host));
        prop_assert_eq!((host.budget, host.used, host.free), (self.budget, used.len() as u32, self.clean(Tier::Host)));
        prop_assert!(used.iter().all(|&(_, slot)| slot < u64::from(host.end)));
        prop_assert_eq!((summary.scrubbed, host.scrubbed), (self.scrubbed[0], self.scrubbed[1]));
        prop_assert_eq!([summary.moved_in, summary.moved_out], self.moved);
        Ok(())
    }

    /// Checks that nothing leaks, and that all promises can be kept at the same time, even if other VMs have used the
    /// promised chunks.
    pub(super) fn collect(mut self) -> Result<(), TestCaseError> {
        while !self.flights.is_empty() {
            self.end(0, self.flights.len().is_multiple_of(2))?;
            self.note_peaks();
        }
        self.scrub()?;
        // Move the chunks in the reserve to host memory. If no host slot is free, they return to the card below.
        for (vm, index) in self.table.parked().collect::<Vec<_>>() {
            self.begin(vm.0, index, To::Host)?;
            self.end(0, true)?;
        }
        self.scrub()?;
        prop_assert!(self.parked() == 0 || self.room(Tier::Host) == 0);
        let mut ids: Vec<u32> = self.vms.keys().copied().collect();
        ids.sort_by_key(|id| self.vms[id].guarantee());
        for id in ids {
            for index in 0..self.vms[&id].count() {
                self.place(id, u64::from(index) * CHUNK)?;
                self.begin(id, index, To::Card)?;
                self.end(0, true)?;
            }
            prop_assert!(self.used(id, Tier::Card) >= self.vms[&id].guarantee());
        }
        for _ in self.mediator()..self.aside {
            prop_assert!(self.table.reserve_mediator(1, 1).is_ok());
        }
        let held: u32 = self
            .held
            .drain(..)
            .map(|(first, count)| {
                self.table.release_mediator(first, count);
                count
            })
            .sum();
        prop_assert!(held <= CHUNKS);
        for id in std::mem::take(&mut self.vms).into_keys() {
            self.table.destroy_vm(TenantId(id)).unwrap();
        }
        self.table.set_host_budget(0);
        while let Some(work) = self.table.take_scrub_work() {
            self.table.scrubbed(work.place);
        }
        let summary = self.table.summary();
        prop_assert_eq!((summary.free + summary.mediator, summary.promised, summary.host.end), (CHUNKS, 0, 0));
        Ok(())
    }
}
