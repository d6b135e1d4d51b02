//! Compares the table with a model during random operations. The model stores the last token written to each card chunk
//! and host slot, and the place of each guest chunk. The model does not use the table's states and totals.

mod audit;
mod op;

use super::{CHUNK, scrub_all, table};
use crate::{
    ChunkId, ChunkTable, Ended, Error, GuestVramAddr, HostAddr, Limit, Limits, Lookup, MoveId, OnFull, Place,
    SavedChunks, ScrubWork, Step, TenantId, Tier, To, VramAddr,
};
use op::{Op, op};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const CHUNKS: u32 = 12;
const BUDGET_MAX: u32 = 10;

/// A card chunk from 0 to 11, or a host slot.
type Piece = (Tier, u64);

fn piece(place: Place) -> Piece {
    match place {
        Place::Card(VramAddr(at)) => (Tier::Card, at / CHUNK),
        Place::Host(HostAddr(at)) => (Tier::Host, at / CHUNK),
    }
}

fn start((tier, number): Piece) -> Place {
    match tier {
        Tier::Card => Place::Card(VramAddr(number * CHUNK)),
        Tier::Host => Place::Host(HostAddr(number * CHUNK)),
    }
}

#[derive(Debug, Default)]
struct Vm {
    bytes: u64,
    limits: Limits,
    /// Place of each guest chunk, and the token that its VM has written.
    chunks: BTreeMap<u32, (Piece, u64)>,
    /// Chunks that are in the reserve.
    parked: BTreeSet<u32>,
    peaks: [u32; 2],
    born_in_host: u64,
    moved: [u64; 2],
}

impl Vm {
    fn count(&self) -> u32 {
        self.bytes.div_ceil(CHUNK) as u32
    }

    /// Returns the number of chunks in `tier`, including those in the reserve.
    fn placed(&self, tier: Tier) -> u32 {
        self.chunks.values().filter(|(piece, _)| piece.0 == tier).count() as u32
    }

    /// Returns the number of chunks that are counted as chunks of `tier`.
    fn counted(&self, tier: Tier) -> u32 {
        let parked = self.parked.len() as u32;
        if tier == Tier::Card { self.placed(tier) - parked } else { self.placed(tier) + parked }
    }

    fn guarantee(&self) -> u32 {
        self.limits.guarantee.min(self.count())
    }
}

/// A move in flight. `vm` is `None` if the VM was destroyed, and `alive` is false if the chunk was unplaced.
struct Flight {
    id: MoveId,
    vm: Option<u32>,
    index: u32,
    from: Piece,
    to: Piece,
    drains: bool,
    alive: bool,
}

struct Model {
    table: ChunkTable,
    contents: BTreeMap<Piece, u64>,
    /// Chunks and slots that have lost their owner and are not scrubbed yet.
    dirty: BTreeSet<Piece>,
    vms: BTreeMap<u32, Vm>,
    flights: Vec<Flight>,
    held: Vec<(ChunkId, u32)>,
    aside: u32,
    claimed: u32,
    borrowed: u32,
    reserve: u32,
    budget: u32,
    scrubbing: Vec<ScrubWork>,
    scrubbed: [u64; 2],
    /// Numbers of moves to the card and to host memory, including those of removed VMs.
    moved: [u64; 2],
    token: u64,
}

impl Model {
    fn new() -> Self {
        Self {
            table: table(CHUNKS.into()),
            contents: BTreeMap::new(),
            dirty: BTreeSet::new(),
            vms: BTreeMap::new(),
            flights: Vec::new(),
            held: Vec::new(),
            aside: 0,
            claimed: 0,
            borrowed: 0,
            reserve: 0,
            budget: 0,
            scrubbing: Vec::new(),
            scrubbed: [0; 2],
            moved: [0; 2],
            token: 0,
        }
    }

    fn mediator(&self) -> u32 {
        self.held.iter().map(|(_, count)| count).sum()
    }

    /// Returns the chunks and slots that have an owner or are destinations of moves.
    fn owned(&self, tier: Tier) -> BTreeSet<Piece> {
        let places = self.vms.values().flat_map(|vm| vm.chunks.values().map(|(piece, _)| *piece));
        let own = self.held.iter().flat_map(|&(first, count)| {
            let first = self.table.address(first).0 / CHUNK;
            (first..first + u64::from(count)).map(|number| (Tier::Card, number))
        });
        places.chain(own).chain(self.flights.iter().map(|flight| flight.to)).filter(|piece| piece.0 == tier).collect()
    }

    fn room(&self, tier: Tier) -> u32 {
        let limit = if tier == Tier::Card { CHUNKS } else { self.budget };
        limit.saturating_sub(self.owned(tier).len() as u32)
    }

    /// Returns the number of chunks or slots that can be allocated immediately.
    fn clean(&self, tier: Tier) -> u32 {
        let (limit, owned) = (if tier == Tier::Card { CHUNKS } else { self.budget }, self.owned(tier));
        let scrubbing = |at| self.scrubbing.iter().any(|work| piece(work.place) == at);
        let usable = |&at: &Piece| !owned.contains(&at) && !self.dirty.contains(&at) && !scrubbing(at);
        let clean = (0..u64::from(limit)).map(|number| (tier, number)).filter(usable).count() as u32;
        clean.min(self.room(tier))
    }

    /// Returns true if a dirty chunk or slot within the limit could be allocated after scrubbing.
    fn has_waiting(&self, tier: Tier) -> bool {
        let limit = u64::from(if tier == Tier::Card { CHUNKS } else { self.budget });
        self.room(tier) > 0 && self.dirty.iter().any(|at| at.0 == tier && at.1 < limit)
    }

    /// Returns the number of chunks that count towards a VM's limits in `tier`.
    fn used(&self, id: u32, tier: Tier) -> u32 {
        let to = |flight: &&Flight| flight.vm == Some(id) && flight.to.0 == tier && !flight.drains;
        self.vms[&id].counted(tier) + self.flights.iter().filter(to).count() as u32
    }

    fn owed(&self, id: u32) -> u32 {
        self.vms[&id].guarantee().saturating_sub(self.used(id, Tier::Card))
    }

    fn promised(&self) -> u32 {
        self.vms.keys().map(|&id| self.owed(id)).sum()
    }

    fn parked(&self) -> u32 {
        self.vms.values().map(|vm| vm.parked.len() as u32).sum()
    }

    fn left_reserve(&self) -> u32 {
        self.reserve.saturating_sub(self.parked() + self.borrowed)
    }

    fn left_aside(&self) -> u32 {
        self.aside.saturating_sub(self.mediator())
    }

    fn for_mediator(&self) -> u32 {
        self.room(Tier::Card) - self.promised() - self.left_reserve()
    }

    /// Returns the number of free chunks that are not promised.
    fn uncommitted(&self) -> u32 {
        self.for_mediator() - self.left_aside()
    }

    fn spare(&self) -> u32 {
        self.uncommitted().saturating_sub(self.claimed + self.borrowed)
    }

    /// Returns the number of slots that are not reserved for chunks in the reserve.
    fn host_room(&self) -> u32 {
        let draining = self.flights.iter().filter(|flight| flight.drains && flight.alive).count() as u32;
        self.room(Tier::Host).saturating_sub(self.parked() - draining)
    }

    fn is_limited(&self, id: u32, tier: Tier) -> bool {
        let limits = self.vms[&id].limits;
        match tier {
            Tier::Card => self.used(id, tier) >= limits.quota || (self.owed(id) == 0 && self.spare() == 0),
            Tier::Host => self.used(id, tier) >= limits.swap_cap || self.host_room() == 0,
        }
    }

    fn note_peaks(&mut self) {
        for id in self.vms.keys().copied().collect::<Vec<_>>() {
            let used = [self.used(id, Tier::Card), self.used(id, Tier::Host)];
            let peaks = &mut self.vms.get_mut(&id).expect("the VM exists").peaks;
            *peaks = [peaks[0].max(used[0]), peaks[1].max(used[1])];
        }
    }

    /// Checks that a chunk or slot contains zeros, writes a new token to it, and returns the token.
    fn write(&mut self, at: Piece) -> Result<u64, TestCaseError> {
        prop_assert_eq!(self.contents.get(&at), None, "{:?} does not contain zeros", at);
        self.token += 1;
        self.contents.insert(at, self.token);
        Ok(self.token)
    }

    fn may_have(&self, vm: u32, new: &Vm, used: u32, owed: u32) -> bool {
        let promise = new.guarantee().saturating_sub(used) <= owed + self.uncommitted();
        promise && new.limits.guarantee <= new.limits.quota && new.limits.weight > 0 && vm < 4
    }

    fn apply(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Create(id, bytes, limits) => {
                let new = Vm { bytes, limits, ..Vm::default() };
                let expected = !self.vms.contains_key(&id) && bytes > 0 && self.may_have(id, &new, 0, 0);
                prop_assert_eq!(self.table.create_vm(TenantId(id), bytes, limits).is_ok(), expected);
                if expected {
                    self.vms.insert(id, new);
                }
            }
            Op::SetLimits(id, limits) => {
                let expected = self.vms.get(&id).is_some_and(|vm| {
                    let new = Vm { bytes: vm.bytes, limits, ..Vm::default() };
                    self.may_have(id, &new, self.used(id, Tier::Card), self.owed(id))
                });
                prop_assert_eq!(self.table.set_limits(TenantId(id), limits).is_ok(), expected);
                if let Some(vm) = self.vms.get_mut(&id).filter(|_| expected) {
                    vm.limits = limits;
                }
            }
            Op::Destroy(id) => {
                let known = self.vms.get(&id).map(|vm| vm.chunks.len() as u32);
                prop_assert_eq!(self.table.destroy_vm(TenantId(id)), known.ok_or(Error::NoSuchVm(TenantId(id))));
                self.lose(id, |_| true);
                self.vms.remove(&id);
                self.flights.iter_mut().filter(|flight| flight.vm == Some(id)).for_each(|flight| flight.vm = None);
            }
            Op::Place(vm, address) => self.place(vm, address)?,
            Op::Unplace(id, address) => {
                let known = self.vms.get(&id).filter(|vm| address < vm.bytes);
                let index = (address / CHUNK) as u32;
                let expected = known.map(|vm| vm.chunks.contains_key(&index));
                prop_assert_eq!(self.table.unplace(TenantId(id), GuestVramAddr(address)).ok(), expected);
                self.lose(id, |at| at == index && expected == Some(true));
            }
            Op::UnplaceAll(id) => {
                let known = self.vms.get(&id).map_or(0, |vm| vm.chunks.len() as u32);
                prop_assert_eq!(self.table.unplace_all(TenantId(id)), known);
                self.lose(id, |_| true);
            }
            Op::Begin(vm, index, to) => self.begin(vm, index, to)?,
            Op::EvictionReserve(chunks) => {
                let expected = chunks.saturating_sub(self.parked()) <= self.uncommitted() + self.left_reserve();
                prop_assert_eq!(self.table.set_reserve(chunks).is_ok(), expected);
                if expected {
                    self.reserve = chunks;
                }
            }
            Op::Copy(which) => self.copy(which),
            Op::Commit(which) => self.end(which, true)?,
            Op::Abort(which) => self.end(which, false)?,
            Op::Budget(slots) => {
                self.table.set_host_budget(slots);
                self.budget = slots;
            }
            Op::Reserve(count) => self.reserve(count)?,
            Op::Release(which) => {
                if !self.held.is_empty() {
                    let (first, count) = self.held.swap_remove(which % self.held.len());
                    self.table.release_mediator(first, count);
                    let number = self.table.address(first).0 / CHUNK;
                    self.dirty.extend((number..number + u64::from(count)).map(|number| (Tier::Card, number)));
                }
            }
            Op::SetAside(chunks) => {
                let expected = chunks.saturating_sub(self.mediator()) <= self.for_mediator();
                prop_assert_eq!(self.table.set_aside(chunks).is_ok(), expected);
                if expected {
                    self.aside = chunks;
                }
            }
            Op::Claim(chunks) => {
                self.table.claim(chunks);
                self.claimed = chunks.saturating_sub(self.left_aside());
            }
            Op::Repay => {
                self.table.repay();
                self.borrowed -= self.borrowed.min(self.uncommitted());
            }
            Op::TakeScrub(tier) => {
                let waits = |tier| self.dirty.iter().any(|piece| piece.0 == tier);
                let expected = tier.map_or(waits(Tier::Card) || waits(Tier::Host), waits);
                let work = match tier {
                    Some(tier) => self.table.take_scrub_work_in(tier),
                    None => self.table.take_scrub_work(),
                };
                prop_assert_eq!(work.is_some(), expected);
                if let Some(work) = work {
                    prop_assert!(self.dirty.remove(&piece(work.place)));
                    self.scrubbing.push(work);
                }
            }
            Op::Restore => {
                let saved = self.table.save();
                let read: SavedChunks = postcard::from_bytes(&postcard::to_allocvec(&saved).unwrap()).unwrap();
                prop_assert_eq!(&read, &saved);
                self.table = ChunkTable::try_from(read).map_err(|why| TestCaseError::fail(why.to_string()))?;
                prop_assert_eq!(self.table.save(), saved);
                // Scrubs in progress are lost, so their chunks and slots are dirty again.
                self.dirty.extend(self.scrubbing.drain(..).map(|work| piece(work.place)));
            }
            Op::FinishScrub(which) => {
                if !self.scrubbing.is_empty() {
                    let work = self.scrubbing.swap_remove(which % self.scrubbing.len());
                    self.finish_scrub(work);
                }
            }
        }
        self.note_peaks();
        Ok(())
    }

    fn finish_scrub(&mut self, work: ScrubWork) {
        let at = piece(work.place);
        self.contents.remove(&at);
        self.scrubbed[at.0 as usize] += 1;
        self.table.scrubbed(work.place);
    }

    /// Removes the places of the selected chunks, and marks their moves as ineffective.
    fn lose(&mut self, id: u32, which: impl Fn(u32) -> bool) {
        let Some(vm) = self.vms.get_mut(&id) else { return };
        for (_, (at, _)) in vm.chunks.extract_if(.., |&index, _| which(index)) {
            self.dirty.insert(at);
        }
        vm.parked.retain(|&index| !which(index));
        let of_them = |flight: &&mut Flight| flight.vm == Some(id) && which(flight.index);
        self.flights.iter_mut().filter(of_them).for_each(|flight| flight.alive = false);
    }

    fn place(&mut self, id: u32, address: u64) -> Result<(), TestCaseError> {
        let result = self.table.place(TenantId(id), GuestVramAddr(address));
        let Some(vm) = self.vms.get(&id) else {
            prop_assert_eq!(result, Err(Error::NoSuchVm(TenantId(id))));
            return Ok(());
        };
        let index = (address / CHUNK) as u32;
        if address >= vm.bytes {
            prop_assert_eq!(result, Err(Error::OutOfRange { vm: TenantId(id), address: GuestVramAddr(address) }));
            return Ok(());
        }
        if let Some(&(at, _)) = vm.chunks.get(&index) {
            let placed = result.unwrap();
            let whole = self.table.lookup(TenantId(id), GuestVramAddr(u64::from(index) * CHUNK), 1);
            prop_assert_eq!((piece(placed.place), placed.new, whole), (at, false, Lookup::Placed(start(at))));
            return Ok(());
        }
        let swaps = vm.limits.on_full == OnFull::Swap;
        let tier = if self.is_limited(id, Tier::Card) { Tier::Host } else { Tier::Card };
        if tier == Tier::Host && (!swaps || self.is_limited(id, Tier::Host)) {
            let Err(Error::Full { vm, limit, host }) = result else { panic!("{result:?}") };
            let limits = self.vms[&id].limits;
            prop_assert_eq!(
                (vm, limit == Limit::Quota(limits.quota)),
                (TenantId(id), self.used(id, Tier::Card) >= limits.quota)
            );
            prop_assert_eq!(host == Some(Limit::Policy(limits.on_full)), !swaps);
        } else if self.clean(tier) == 0 {
            prop_assert_eq!(result, Err(Error::NeedsScrub { tier, short: 1 }));
        } else {
            let placed = result.unwrap();
            let at = piece(placed.place);
            prop_assert!(placed.new && at.0 == tier && (tier == Tier::Card || at.1 < u64::from(self.budget)));
            let offset =
                placed.place.card().map_or_else(|| placed.place.host().unwrap().0, |address| address.0) % CHUNK;
            prop_assert_eq!(offset, address % CHUNK);
            let token = self.write(at)?;
            let vm = self.vms.get_mut(&id).expect("the VM was found above");
            vm.chunks.insert(index, (at, token));
            vm.born_in_host += u64::from(tier == Tier::Host);
        }
        Ok(())
    }

    fn begin(&mut self, id: u32, index: u32, to: To) -> Result<(), TestCaseError> {
        let result = self.table.start(Step { vm: TenantId(id), index, to });
        let (vm, tier) = (TenantId(id), if to == To::Card { Tier::Card } else { Tier::Host });
        let parked = self.vms.get(&id).is_some_and(|vm| vm.parked.contains(&index));
        let chunk = self.vms.get(&id).map(|vm| vm.chunks.get(&index).copied());
        let moving = self.flights.iter().any(|flight| flight.alive && flight.vm == Some(id) && flight.index == index);
        match chunk {
            None => prop_assert_eq!(result, Err(Error::NoSuchVm(vm))),
            Some(None) => prop_assert_eq!(result, Err(Error::NotPlaced { vm, index })),
            Some(Some(_)) if moving => prop_assert_eq!(result, Err(Error::Moving { vm, index })),
            Some(Some((from, _))) if to == To::Reserve && (parked || from.0 == Tier::Host) => {
                prop_assert_eq!(result, Err(Error::Settled { vm, index }));
            }
            Some(Some((from, _))) if from.0 == tier && !parked => {
                prop_assert_eq!(result, Err(Error::Settled { vm, index }));
            }
            Some(Some(_)) if parked && to == To::Host && self.room(Tier::Host) == 0 => {
                prop_assert_eq!(result, Err(Error::Full { vm, limit: Limit::HostBudget(self.budget), host: None }));
            }
            Some(Some(_)) if !(parked && to == To::Host) && self.is_limited(id, tier) => {
                let full = matches!(result, Err(Error::Full { host: None, .. }));
                prop_assert!(full, "{:?}", result);
            }
            Some(Some(_)) if to == To::Reserve && self.left_reserve() == 0 => {
                prop_assert_eq!(result, Err(Error::ReserveFull(self.reserve)));
            }
            Some(Some(_)) if to == To::Reserve || (parked && to == To::Card) => {
                prop_assert_eq!(result, Ok(None));
                let vm = self.vms.get_mut(&id).expect("the VM was found above");
                let changed = if parked { vm.parked.remove(&index) } else { vm.parked.insert(index) };
                prop_assert!(changed);
            }
            Some(Some(_)) if self.clean(tier) == 0 && !self.has_waiting(tier) => {
                prop_assert_eq!(result, Err(Error::NeedsScrub { tier, short: 1 }));
            }
            Some(Some((from, _))) => {
                let begun = result.unwrap().unwrap();
                let to = piece(begun.to);
                prop_assert_eq!((begun.vm, begun.index, piece(begun.from), to.0), (vm, index, from, tier));
                // The copy overwrites the whole destination, so it needs no scrub.
                let waited = self.dirty.remove(&to);
                prop_assert!(waited || !self.contents.contains_key(&to), "a destination has another use");
                prop_assert!(!self.owned(tier).contains(&to));
                self.flights.push(Flight { id: begun.id, vm: Some(id), index, from, to, drains: parked, alive: true });
            }
        }
        Ok(())
    }

    /// Copies the contents of a move's source to its destination as the copy engine does, even if the chunk was
    /// unplaced.
    fn copy(&mut self, which: usize) {
        if self.flights.is_empty() {
            return;
        }
        let Flight { from, to, .. } = self.flights[which % self.flights.len()];
        match self.contents.get(&from).copied() {
            Some(token) => self.contents.insert(to, token),
            None => self.contents.remove(&to),
        };
    }

    fn end(&mut self, which: usize, commit: bool) -> Result<(), TestCaseError> {
        if self.flights.is_empty() {
            return Ok(());
        }
        let which = which % self.flights.len();
        if commit {
            self.copy(which);
        }
        let flight = self.flights.swap_remove(which);
        if !commit {
            self.table.abort_move(flight.id);
            self.dirty.insert(flight.to);
            return Ok(());
        }
        let expected = if flight.alive { Ended::Committed } else { Ended::Gone };
        prop_assert_eq!(self.table.commit_move(flight.id), expected);
        let vm = flight.vm.and_then(|vm| self.vms.get_mut(&vm)).filter(|_| flight.alive);
        if let Some(vm) = vm {
            vm.chunks.get_mut(&flight.index).expect("the chunk exists").0 = flight.to;
            vm.parked.remove(&flight.index);
            vm.moved[flight.to.0 as usize] += 1;
            self.moved[flight.to.0 as usize] += 1;
        }
        self.dirty.insert(if flight.alive { flight.from } else { flight.to });
        Ok(())
    }

    fn reserve(&mut self, count: u32) -> Result<(), TestCaseError> {
        let room = self.for_mediator() + self.left_reserve();
        let (borrowed, beyond) = (count.saturating_sub(self.for_mediator()), count.saturating_sub(self.left_aside()));
        match self.table.reserve_mediator(count, 1) {
            Ok(first) => {
                prop_assert!(count <= room);
                for step in 0..u64::from(count) {
                    let chunk = self.table.address(first).0 / CHUNK + step;
                    self.write((Tier::Card, chunk))?;
                }
                self.held.push((first, count));
                self.claimed = self.claimed.saturating_sub(beyond);
                self.borrowed += borrowed;
            }
            // A single chunk is always a contiguous run, so a promised chunk can be allocated.
            Err(error) if count == 1 => {
                let dirty = room > 0 && self.clean(Tier::Card) == 0;
                prop_assert_eq!(matches!(error, Error::NeedsScrub { .. }), dirty);
                prop_assert_eq!(matches!(error, Error::CardFull { .. }), room == 0);
            }
            Err(_) => {}
        }
        Ok(())
    }

    fn scrub(&mut self) -> Result<(), TestCaseError> {
        while let Some(work) = self.scrubbing.pop() {
            self.finish_scrub(work);
        }
        while let Some(work) = self.table.take_scrub_work() {
            prop_assert!(self.dirty.remove(&piece(work.place)));
            self.finish_scrub(work);
        }
        prop_assert!(self.dirty.is_empty());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    /// Checks invariant 3: each chunk has one owner and one place, moves preserve its data, no owner can read another
    /// owner's data, no VM gets chunks that are promised to other VMs, and no move exceeds a limit.
    #[test]
    fn every_chunk_has_one_owner_and_keeps_its_contents(ops in prop::collection::vec(op(), 1..200)) {
        let mut model = Model::new();
        for op in ops {
            model.apply(op)?;
            model.check()?;
        }
        model.collect()?;
    }

    /// Checks that `translate`, `lookup` and `pieces` agree with each other, for any order of first uses and any moves
    /// to host memory.
    #[test]
    fn ranges_are_in_one_piece_as_the_runs_say(
        address in 0u64..5 * CHUNK,
        len in 1u64..5 * CHUNK,
        uses in prop::collection::vec(0u64..4, 0..6),
        moves in prop::collection::vec(0u32..4, 0..4),
    ) {
        let mut table = table(8);
        table.set_host_budget(8);
        table.create_vm(TenantId(1), 3 * CHUNK + 0x800, Limits { guarantee: 4, ..Limits::default() }).unwrap();
        for index in uses {
            table.place(TenantId(1), GuestVramAddr(index * CHUNK)).unwrap();
        }
        for index in moves {
            if let Ok(begun) = table.begin_move(TenantId(1), index, To::Host) {
                table.commit_move(begun.id);
            }
        }
        scrub_all(&mut table);
        let at = GuestVramAddr(address);
        let inside = address + len <= 3 * CHUNK + 0x800;
        let run = table.translate(TenantId(1), at);
        let range = table.lookup(TenantId(1), at, len);
        let whole = run.filter(|run| run.bytes >= len).map(|run| run.place);
        prop_assert_eq!(table.translate_range(TenantId(1), at, len), whole);
        let pieces: Vec<_> = table.pieces(at, len).collect();
        prop_assert_eq!(pieces.iter().map(|(_, len)| len).sum::<u64>(), len);
        let answers: Vec<_> = pieces.iter().map(|&(at, len)| table.lookup(TenantId(1), at, len)).collect();
        prop_assert!(!answers.contains(&Lookup::Split));
        prop_assert_eq!(range == Lookup::Outside, !inside);
        if inside {
            prop_assert_eq!(range == Lookup::Unplaced, answers.iter().all(|answer| *answer == Lookup::Unplaced));
            prop_assert_eq!(range, whole.map_or(
                if range == Lookup::Unplaced { Lookup::Unplaced } else { Lookup::Split },
                Lookup::Placed,
            ));
        }
    }
}
