//! Random sequences against a model that keeps, for each chunk of the card, who wrote into it last, and for each VM, which
//! of its chunks it uses. It knows nothing of the table's own states and sums.

use super::{CHUNK, scrub_all, table};
use crate::{CardAddr, ChunkId, ChunkTable, Error, GuestAddr, Lookup, ScrubWork, VmId, VmSummary};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};

const CHUNKS: u32 = 12;

#[derive(Clone, Debug)]
enum Op {
    Create(u32, u64, bool),
    Destroy(u32),
    Place(u32, u64),
    Unplace(u32, u64),
    UnplaceAll(u32),
    Reserve(u32),
    Release(usize),
    SetAside(u32),
    TakeScrub,
    FinishScrub(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let address = || 0..8 * CHUNK;
    prop_oneof![
        3 => (0..4u32, 0..6 * CHUNK, any::<bool>()).prop_map(|(vm, bytes, reserve)| Op::Create(vm, bytes, reserve)),
        1 => (0..4u32).prop_map(Op::Destroy),
        8 => (0..4u32, address()).prop_map(|(vm, address)| Op::Place(vm, address)),
        2 => (0..4u32, address()).prop_map(|(vm, address)| Op::Unplace(vm, address)),
        1 => (0..4u32).prop_map(Op::UnplaceAll),
        1 => (1..3u32).prop_map(Op::Reserve),
        1 => any::<usize>().prop_map(Op::Release),
        1 => (0..4u32).prop_map(Op::SetAside),
        4 => Just(Op::TakeScrub),
        4 => any::<usize>().prop_map(Op::FinishScrub),
    ]
}

/// Who has written into a chunk last; `None` is zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    Vm(u32),
    Mediator,
}

#[derive(Debug, Default)]
struct Vm {
    bytes: u64,
    reserve: bool,
    /// Card chunk by guest chunk.
    places: BTreeMap<u64, usize>,
    peak: usize,
}

impl Vm {
    fn chunks(&self) -> u64 {
        self.bytes.div_ceil(CHUNK)
    }

    fn owed(&self) -> u32 {
        if self.reserve { self.chunks() as u32 - self.places.len() as u32 } else { 0 }
    }
}

struct Model {
    table: ChunkTable,
    contents: Vec<Option<Writer>>,
    vms: HashMap<u32, Vm>,
    held: Vec<(ChunkId, u32)>,
    aside: u32,
    scrubbing: Vec<ScrubWork>,
}

impl Model {
    fn new() -> Self {
        Self {
            table: table(CHUNKS.into()),
            contents: vec![None; CHUNKS as usize],
            vms: HashMap::new(),
            held: Vec::new(),
            aside: 0,
            scrubbing: Vec::new(),
        }
    }

    fn mediator(&self) -> u32 {
        self.held.iter().map(|(_, count)| count).sum()
    }

    fn unowned(&self) -> u32 {
        CHUNKS - self.mediator() - self.vms.values().map(|vm| vm.places.len() as u32).sum::<u32>()
    }

    fn promised(&self) -> u32 {
        self.vms.values().map(Vm::owed).sum()
    }

    fn spare(&self) -> u32 {
        self.unowned() - self.promised() - self.aside.saturating_sub(self.mediator())
    }

    /// Chunks without an owner that are zeroed.
    fn clean(&self) -> usize {
        let taken = |at: usize| self.vms.values().any(|vm| vm.places.values().any(|&place| place == at));
        let scrubbing = |at: usize| self.scrubbing.iter().any(|work| work.address.0 / CHUNK == at as u64);
        (0..self.contents.len()).filter(|&at| self.contents[at].is_none() && !taken(at) && !scrubbing(at)).count()
    }

    /// The new owner finds zeros, and leaves something.
    fn write(&mut self, chunk: usize, writer: Writer) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.contents[chunk], None, "chunk {} is not clean", chunk);
        self.contents[chunk] = Some(writer);
        Ok(())
    }

    fn apply(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Create(vm, bytes, reserve) => {
                let new = Vm { bytes, reserve, ..Vm::default() };
                let fits = !reserve || new.chunks() <= self.spare().into();
                let expected = !self.vms.contains_key(&vm) && bytes > 0 && fits;
                prop_assert_eq!(self.table.create_vm(VmId(vm), bytes, reserve).is_ok(), expected);
                if expected {
                    self.vms.insert(vm, new);
                }
            }
            Op::Destroy(vm) => {
                let known = self.vms.remove(&vm).map(|vm| vm.places.len() as u32);
                prop_assert_eq!(self.table.destroy_vm(VmId(vm)), known.ok_or(Error::NoSuchVm(VmId(vm))));
            }
            Op::Place(vm, address) => self.place(vm, address)?,
            Op::Unplace(vm, address) => {
                let known = self.vms.get_mut(&vm).filter(|vm| address < vm.bytes);
                let expected = known.map(|vm| vm.places.remove(&(address / CHUNK)).is_some());
                prop_assert_eq!(self.table.unplace(VmId(vm), GuestAddr(address)).ok(), expected);
            }
            Op::UnplaceAll(vm) => {
                let known = self.vms.get_mut(&vm).map(|vm| std::mem::take(&mut vm.places));
                prop_assert_eq!(self.table.unplace_all(VmId(vm)), known.map_or(0, |places| places.len() as u32));
            }
            Op::Reserve(count) => {
                let room = self.unowned() - self.promised();
                match self.table.reserve_mediator(count, 1) {
                    Ok(first) => {
                        prop_assert!(count <= room);
                        for step in 0..u64::from(count) {
                            let chunk = self.table.address(first).0 / CHUNK + step;
                            self.write(chunk as usize, Writer::Mediator)?;
                        }
                        self.held.push((first, count));
                    }
                    // One chunk is a run always, so it is there when it is promised.
                    Err(error) if count == 1 => {
                        let dirty = room > 0 && self.clean() == 0;
                        prop_assert_eq!(matches!(error, Error::NeedsScrub { .. }), dirty);
                        prop_assert_eq!(matches!(error, Error::Full { .. }), room == 0);
                    }
                    Err(_) => {}
                }
            }
            Op::Release(which) => {
                if !self.held.is_empty() {
                    let (first, count) = self.held.swap_remove(which % self.held.len());
                    self.table.release_mediator(first, count);
                }
            }
            Op::SetAside(chunks) => {
                let expected = chunks.saturating_sub(self.mediator()) <= self.unowned() - self.promised();
                prop_assert_eq!(self.table.set_aside(chunks).is_ok(), expected);
                if expected {
                    self.aside = chunks;
                }
            }
            Op::TakeScrub => self.scrubbing.extend(self.table.take_scrub_work()),
            Op::FinishScrub(which) => {
                if !self.scrubbing.is_empty() {
                    let work = self.scrubbing.swap_remove(which % self.scrubbing.len());
                    self.contents[(work.address.0 / CHUNK) as usize] = None;
                    self.table.scrubbed(work.chunk);
                }
            }
        }
        Ok(())
    }

    fn place(&mut self, id: u32, address: u64) -> Result<(), TestCaseError> {
        let (spare, clean) = (self.spare(), self.clean());
        let result = self.table.place(VmId(id), GuestAddr(address));
        let Some(vm) = self.vms.get(&id) else {
            prop_assert_eq!(result, Err(Error::NoSuchVm(VmId(id))));
            return Ok(());
        };
        let index = address / CHUNK;
        if address >= vm.bytes {
            prop_assert_eq!(result, Err(Error::OutOfRange { vm: VmId(id), address: GuestAddr(address) }));
        } else if let Some(&chunk) = vm.places.get(&index) {
            let placed = result.unwrap();
            prop_assert_eq!((placed.address, placed.new), (CardAddr(chunk as u64 * CHUNK + address % CHUNK), false));
        } else if !vm.reserve && spare == 0 {
            let full = matches!(result, Err(Error::Full { .. }));
            prop_assert!(full, "{:?}", result);
        } else if clean == 0 {
            prop_assert_eq!(result, Err(Error::NeedsScrub { short: 1 }));
        } else {
            let placed = result.unwrap();
            prop_assert!(placed.new && placed.address.0 % CHUNK == address % CHUNK);
            let chunk = (placed.address.0 / CHUNK) as usize;
            self.write(chunk, Writer::Vm(id))?;
            let vm = self.vms.get_mut(&id).expect("looked up above");
            vm.places.insert(index, chunk);
            vm.peak = vm.peak.max(vm.places.len());
        }
        Ok(())
    }

    /// One owner and one place for each chunk; the sums are those of the parts.
    fn check(&self) -> Result<(), TestCaseError> {
        let mut reached = vec![false; CHUNKS as usize];
        for (&id, vm) in &self.vms {
            for index in 0..vm.chunks() {
                let at = GuestAddr(index * CHUNK);
                let last = vm.bytes.min((index + 1) * CHUNK) - 1;
                let (first, whole) =
                    (self.table.translate(VmId(id), at), self.table.lookup(VmId(id), at, last + 1 - at.0));
                let Some(&chunk) = vm.places.get(&index) else {
                    prop_assert_eq!((first, whole), (None, Lookup::Unplaced));
                    continue;
                };
                prop_assert!(!std::mem::replace(&mut reached[chunk], true), "chunk {} has two owners", chunk);
                prop_assert_eq!(self.contents[chunk], Some(Writer::Vm(id)));
                let address = CardAddr(chunk as u64 * CHUNK);
                prop_assert_eq!((first.map(|run| run.address), whole), (Some(address), Lookup::Placed(address)));
                prop_assert_eq!(self.table.owner(address), Some((VmId(id), at)));
            }
            prop_assert_eq!(self.table.lookup(VmId(id), GuestAddr(vm.bytes), 1), Lookup::Outside);
        }
        for (first, count) in &self.held {
            for step in 0..u64::from(*count) {
                let address = CardAddr(self.table.address(*first).0 + step * CHUNK);
                prop_assert!(!std::mem::replace(&mut reached[(address.0 / CHUNK) as usize], true));
                prop_assert_eq!(self.table.owner(address), None);
            }
        }
        let summary = self.table.summary();
        let accounts = self.vms.iter().map(|(&id, vm)| {
            let (advertised, placed) = (vm.chunks() as u32, vm.places.len() as u32);
            let reserved = if vm.reserve { advertised } else { 0 };
            (VmId(id), VmSummary { advertised, reserved, placed, peak: vm.peak as u32 })
        });
        prop_assert_eq!(&summary.vms, &accounts.collect());
        prop_assert_eq!((summary.total, summary.free + summary.to_scrub), (CHUNKS, self.unowned()));
        prop_assert_eq!((summary.mediator, summary.free), (self.mediator(), self.clean() as u32));
        prop_assert_eq!((summary.promised, summary.spare()), (self.promised(), self.spare()));
        let owned = reached.iter().filter(|&&taken| taken).count() as u32;
        prop_assert_eq!(summary.free + summary.to_scrub + owned, CHUNKS);
        Ok(())
    }

    /// What is promised is kept, all of it at once, whatever the VMs without a reservation take before.
    fn collect(mut self) -> Result<(), TestCaseError> {
        while let Some(work) = self.scrubbing.pop() {
            self.contents[(work.address.0 / CHUNK) as usize] = None;
            self.table.scrubbed(work.chunk);
        }
        while let Some(work) = self.table.take_scrub_work() {
            self.contents[(work.address.0 / CHUNK) as usize] = None;
            self.table.scrubbed(work.chunk);
        }
        let mut ids: Vec<u32> = self.vms.keys().copied().collect();
        ids.sort_by_key(|id| self.vms[id].reserve);
        for id in ids {
            for index in 0..self.vms[&id].chunks() {
                self.place(id, index * CHUNK)?;
            }
            let vm = &self.vms[&id];
            prop_assert!(!vm.reserve || vm.places.len() as u64 == vm.chunks());
        }
        for _ in self.mediator()..self.aside {
            prop_assert!(self.table.reserve_mediator(1, 1).is_ok());
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// Invariant 3: one owner, one place, and no owner sees what another left. Nobody gets what is promised to others.
    #[test]
    fn every_chunk_has_one_owner_and_arrives_clean(ops in prop::collection::vec(op(), 1..150)) {
        let mut model = Model::new();
        for op in ops {
            model.apply(op)?;
            model.check()?;
        }
        model.collect()?;
    }

    /// `translate`, `lookup` and `pieces` agree with a byte-wise look at the map, whatever the order of first uses.
    #[test]
    fn ranges_are_in_one_piece_as_the_runs_say(
        address in 0u64..5 * CHUNK,
        len in 1u64..5 * CHUNK,
        uses in prop::collection::vec(0u64..4, 0..6),
    ) {
        let mut table = table(8);
        table.create_vm(VmId(1), 3 * CHUNK + 0x800, true).unwrap();
        for index in uses {
            table.place(VmId(1), GuestAddr(index * CHUNK)).unwrap();
        }
        prop_assert_eq!(scrub_all(&mut table), 0);
        let at = GuestAddr(address);
        let inside = address + len <= 3 * CHUNK + 0x800;
        let run = table.translate(VmId(1), at);
        let range = table.lookup(VmId(1), at, len);
        let whole = run.filter(|run| run.bytes >= len).map(|run| run.address);
        prop_assert_eq!(table.translate_range(VmId(1), at, len), whole);
        let pieces: Vec<_> = table.pieces(at, len).collect();
        prop_assert_eq!(pieces.iter().map(|(_, len)| len).sum::<u64>(), len);
        let answers: Vec<_> = pieces.iter().map(|&(at, len)| table.lookup(VmId(1), at, len)).collect();
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
