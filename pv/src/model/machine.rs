//! A guest controlled by input bytes. The state is checked after each batch.

use super::tables::{Model, Nth, Table};
use super::wire::{self, Raw};
use crate::abi::Status;
use crate::{Answers, Batch, Begun, Op, SLOT_BYTES, TableId, Tables};
use nvspec::addr::GuestVramAddr;
use std::collections::BTreeMap;

/// Size of a step in bytes.
pub(crate) const STEP_BYTES: usize = 8;
/// Maximum number of steps per input.
pub(crate) const MAX_STEPS: usize = 256;
/// Number of step kinds. The first byte of a step selects its kind.
pub(crate) const STEP_KINDS: u8 = 24;

/// End of guest VRAM, which is not a valid start of table space.
const VRAM: u64 = (64 << 20) - 0x1000;
/// Start of table space.
const BASE: u64 = 64 << 20;
const PAGE: usize = 4096;

const HANDLES: [u32; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 0, 0x8000_0000, u32::MAX, 9];
const KINDS: [u32; 8] = [1, 2, 3, 3, 2, 3, 0, 4];
const INDICES: [u32; 8] = [0, 1, 511, 512, 8191, 8192, u32::MAX, 0x2000_0000];
const FIRSTS: [u32; 12] = [0, 1, 2, 511, 512, 1000, 1023, 1024, 32767, 32768, 0x1fff_ffff, u32::MAX];
const COUNTS: [u32; 12] = [1, 2, 3, 511, 512, 513, 1024, 0, 32768, 32769, 0x2000_0001, u32::MAX];
const LIST_LENGTHS: [u32; 6] = [1, 2, 5, 0, 40, 600];
const INSTANCES: [u64; 8] = [0, 0x1000, 0x2000, VRAM - 0x1000, 0x1800, BASE, u64::MAX - 0xfff, 1 << 40];
const WORDS: [u32; 12] = [0, 1, 2, 3, 4, 8, 12, 0x1000, 0x100_0000, 0x100_0004, 0x8000_0000, u32::MAX];
const CODES: [u16; 14] = [0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x20, 0x21, 0x22, 0x30, 0x31, 0x32, 0x33, 0x40];
const FEATURES: [u32; 4] = [u32::MAX, 0x01, 0xdf, 0x7e];

fn pick<T: Copy>(list: &[T], byte: u8) -> T {
    list[usize::from(byte) % list.len()]
}

fn value(shape: u8, more: u8) -> u64 {
    match shape % 5 {
        0 => 0,
        1 => u64::from(more) << 4 | 1,
        2 => u64::MAX - u64::from(more),
        3 => 1 << (more % 64),
        _ => u64::from_le_bytes([more, shape, more, 0, shape, 1, more, shape]),
    }
}

/// The code under test, the model, and a copy of table space that is updated only from pages reported as written.
pub(crate) struct Machine {
    tables: Tables,
    model: Model,
    features: u32,
    /// Operations of the next batch.
    pending: Vec<Raw>,
    /// Changes to the encoded batch, as pairs of an index and the bits to flip.
    pokes: Vec<(usize, u8)>,
    /// Length to which the batch is truncated, in 256ths of its original length.
    cut: Option<u8>,
    /// Known addresses of tables.
    places: BTreeMap<Nth, u64>,
    /// Largest number of tables that have existed at the same time.
    most: usize,
    /// Contents of each table space page at the time of the last report.
    seen: BTreeMap<u64, Vec<u8>>,
}

impl Machine {
    /// Creates a machine. `shape` selects the table limit and the accepted features.
    pub(crate) fn new(shape: u8) -> Self {
        let limit = if shape & 1 == 0 { 2 << 20 } else { (64 << 10) + (256 << 10) + 3 * (8 << 10) };
        Self {
            tables: Tables::new(GuestVramAddr(VRAM), limit),
            model: Model::new(BASE, limit),
            features: pick(&FEATURES, shape >> 1),
            pending: Vec::new(),
            pokes: Vec::new(),
            cut: None,
            places: BTreeMap::new(),
            most: 0,
            seen: BTreeMap::new(),
        }
    }

    /// Executes `bytes`, sends the remaining operations, and then removes everything.
    pub(crate) fn run(mut self, bytes: &[u8]) {
        for step in bytes.chunks(STEP_BYTES).take(MAX_STEPS) {
            let mut whole = [0; STEP_BYTES];
            whole[..step.len()].copy_from_slice(step);
            self.step(whole);
        }
        self.send();
        self.clear();
        assert_eq!(self.seen, BTreeMap::new());
    }

    /// Executes `bytes` like [`Self::run`], but saves and restores the tables after every `every`-th step.
    #[cfg(test)]
    pub(crate) fn run_restored(mut self, bytes: &[u8], every: usize) {
        for (nth, step) in (1..).zip(bytes.chunks_exact(STEP_BYTES).take(MAX_STEPS)) {
            self.step(step.try_into().unwrap());
            if nth % every == 0 {
                self.restore();
            }
        }
        self.send();
        self.clear();
    }

    #[cfg(test)]
    fn restore(&mut self) {
        let saved = self.tables.save();
        let read = postcard::from_bytes(&postcard::to_allocvec(&saved).unwrap()).unwrap();
        self.tables = Tables::restored(read, GuestVramAddr(VRAM), self.model.limit).unwrap();
        assert_eq!(self.tables.save(), saved);
        self.check();
    }

    fn step(&mut self, [kind, a, b, c, d, e, f, g]: [u8; STEP_BYTES]) {
        let table = pick(&HANDLES, a);
        let low_high = |wide: u64| [wide as u32, (wide >> 32) as u32];
        let op = match kind % STEP_KINDS {
            0..=2 => Raw::new(0x01, table, &[pick(&KINDS, b), u32::from(c == 0xff)]),
            3 => Raw::new(0x02, table, &[]),
            4..=6 => {
                let named = |byte: u8| if byte & 0x80 != 0 { 0 } else { pick(&HANDLES, byte) };
                Raw::new(0x03, table, &[pick(&INDICES, b), named(c), named(d), u32::from(e == 0xff)])
            }
            7 | 8 => {
                let words = [low_high(value(d, e)), low_high(value(f, g))].concat();
                Raw::new(0x04, table, &[&[pick(&FIRSTS, b), pick(&COUNTS, c)][..], &words].concat())
            }
            9 | 10 => {
                let length = pick(&LIST_LENGTHS, c);
                let entries = (0..length).flat_map(|nth| low_high(value(d, e.wrapping_add(nth as u8))));
                // Sometimes, use a count that does not match the list.
                let said = if f == 0xff { length.wrapping_add(WORDS[usize::from(g) % 12]) } else { length };
                Raw::new(0x05, table, &[pick(&FIRSTS, b), said].into_iter().chain(entries).collect::<Vec<_>>())
            }
            11 => Raw::new(0x06, table, &[pick(&FIRSTS, b), pick(&COUNTS, c)]),
            12 | 13 => Raw::new(0x07, if c & 3 == 0 { 0 } else { table }, &low_high(pick(&INSTANCES, b))),
            14 => Raw::new(0x08, if b & 1 == 0 { 0 } else { table }, &[]),
            15 => {
                let words = [b, c, d, e, f, g].map(|byte| pick(&WORDS, byte));
                let code = pick(&CODES, a);
                let length = match code {
                    0x11 | 0x31..=0x33 => 2,
                    0x15 => 2 + (words[0] as usize).min(4).next_multiple_of(2),
                    0x20..=0x30 => 6,
                    _ => 0,
                };
                Raw::new(code, pick(&WORDS, a >> 4), &words[..length])
            }
            16 => Raw::new(
                u16::from_le_bytes([a, b & 1]),
                pick(&HANDLES, c),
                &[u32::from(e); 6][..usize::from(d) % 4 * 2],
            ),
            17 => return self.pokes.push((usize::from(u16::from_le_bytes([a, b])), c)),
            18 => {
                self.cut = Some(a);
                return;
            }
            19 => return self.clear(),
            20 => return self.read(a, u16::from_le_bytes([b, c]), u16::from_le_bytes([d, e])),
            _ => return self.send(),
        };
        self.pending.push(op);
    }

    /// Removes all tables and bindings.
    fn clear(&mut self) {
        self.tables.clear();
        self.model.clear();
        self.check();
    }

    /// Reads at an arbitrary address, and compares the result with the model.
    fn read(&mut self, slot: u8, offset: u16, bytes: u16) {
        self.look();
        let address = BASE + u64::from(slot % 8) * SLOT_BYTES + u64::from(offset) * 5 - 16;
        let mut data = vec![0xaa; usize::from(bytes) % 9000 + 1];
        let expected: Option<Vec<u8>> = (address..address + data.len() as u64)
            .map(|at| Some(self.seen.get(&(at & !0xfff))?[at as usize % PAGE]))
            .collect();
        // A read must be within a single table, even if it extends into an adjacent table.
        let one = address / SLOT_BYTES == (address + data.len() as u64 - 1) / SLOT_BYTES;
        let read = self.tables.read(GuestVramAddr(address), &mut data);
        let unchanged = vec![0xaa; data.len()];
        assert_eq!(read.is_ok(), one && expected.is_some(), "{address:#x}");
        assert_eq!(data, if read.is_ok() { expected.unwrap() } else { unchanged });
    }

    /// Sends the prepared batch.
    fn send(&mut self) {
        let mut bytes = wire::batch(&std::mem::take(&mut self.pending));
        for (at, change) in std::mem::take(&mut self.pokes) {
            let at = at % bytes.len();
            bytes[at] ^= change;
        }
        if let Some(part) = self.cut.take() {
            bytes.truncate(bytes.len() * usize::from(part) / 256);
        }
        self.submit(&bytes);
    }

    /// Executes a batch with the code under test and with the model, and compares the results.
    fn submit(&mut self, bytes: &[u8]) {
        let raws = wire::parse(bytes);
        let batch = Batch::parse(bytes);
        assert_eq!(batch.is_ok(), raws.is_some(), "{batch:?}");
        let (Ok(batch), Some(raws)) = (batch, raws) else {
            let answer = Answers::malformed().bytes(usize::MAX);
            assert_eq!(answer, [2, 0, 0, 0, 0, 0, 0, 0]);
            return self.check();
        };
        assert_eq!(batch.count() as usize, raws.len());
        let tables = &mut self.tables;
        let mut begun = raws.iter();
        let mut nth = 0u64;
        let mut work = Begun::new(bytes.to_vec()).unwrap();
        while let Some(op) = work.current(self.features) {
            let done = op.and_then(|op| {
                // Operations must be decoded as they were encoded, and no operation may be started after a rejected
                // one.
                assert_eq!(&wire::encode(&op), begun.next().unwrap());
                nth += 1;
                execute(tables, op).map(|()| nth)
            });
            work.answer(done);
        }
        let answers = work.into_answers();
        let mut expected = Vec::new();
        for raw in &raws {
            let status = Status::Done as u32;
            let refused = self.refusals(raw);
            if !refused.is_empty() {
                assert!(
                    refused.contains(&answers.status()),
                    "{raw:?}: {:?}, expected one of {refused:?}",
                    answers.status()
                );
                break;
            }
            self.model.apply(raw);
            self.most = self.most.max(self.model.live.len());
            expected.push((status, expected.len() as u64 + 1));
        }
        let done = expected.len();
        assert_eq!((answers.done() as usize, answers.status() == Status::Done), (done, done == raws.len()));
        if done < raws.len() {
            expected.push((answers.status() as u32, 0));
            expected.resize(raws.len(), (Status::NotBegun as u32, 0));
        }
        let mut whole = [(answers.status() as u32).to_le_bytes(), (done as u32).to_le_bytes()].concat();
        for (status, value) in expected {
            whole.extend([u64::from(status).to_le_bytes(), value.to_le_bytes()].concat());
        }
        for room in [usize::MAX, whole.len(), whole.len() - 1, 24, 23, 8, 7, 0] {
            let given = if room < 8 { 0 } else { (room.min(whole.len()) - 8) / 16 * 16 + 8 };
            assert_eq!(answers.bytes(room), whole[..given], "with space for {room} bytes");
        }
        self.check();
    }

    fn refusals(&self, raw: &Raw) -> Vec<Status> {
        if wire::features(raw) & !self.features != 0 {
            return vec![Status::Unsupported];
        }
        let alone = wire::refusals(raw);
        if alone.is_empty() { self.model.refusals(raw) } else { alone }
    }

    /// Reads the pages that were reported as written.
    fn look(&mut self) {
        let mut ranges = Vec::new();
        self.tables.take_written(|address, bytes| ranges.push((address.0, bytes)));
        for (address, bytes) in &ranges {
            assert!(*address >= BASE && *bytes > 0 && (address | bytes) % PAGE as u64 == 0);
            for page in (*address..address + bytes).step_by(PAGE) {
                let mut data = vec![0xaa; PAGE];
                match self.tables.read(GuestVramAddr(page), &mut data) {
                    Ok(()) => self.seen.insert(page, data),
                    Err(_) => self.seen.remove(&page),
                };
            }
        }
        assert!(ranges.windows(2).all(|two| two[0].0 + two[0].1 < two[1].0), "ranges are out of order or not merged");
        self.tables.take_written(|address, bytes| panic!("{bytes} bytes at {address} were reported again"));
    }

    /// Checks all invariants.
    fn check(&mut self) {
        self.look();
        let actual = self.all_tables();
        let pages = || actual.iter().flat_map(|(at, data)| (*at..).step_by(PAGE).zip(data.chunks(PAGE)));
        let told = pages().all(|(at, page)| self.seen.get(&at).is_some_and(|seen| seen == page));
        assert!(told && pages().count() == self.seen.len(), "a page was written or removed without being reported");
        let resident = pages().filter(|(_, page)| page.iter().any(|byte| *byte != 0)).count() * PAGE;
        assert_eq!(actual.len(), self.model.live.len());
        self.find_places(&actual);
        let model = &self.model;
        let (mut unknown, mut rest) = (Vec::new(), actual);
        for (nth, table) in model.live.iter().filter(|(_, table)| table.kind != 1) {
            match self.places.get(nth) {
                Some(place) => {
                    let data = rest.remove(place).unwrap();
                    let entries = data.as_chunks().0.iter().map(|entry| u64::from_le_bytes(*entry));
                    assert!(entries.eq(table.entries.iter().copied()), "table {nth} has wrong entries");
                }
                None => unknown.push(contents(table)),
            }
        }
        // Remove the directories, so that only unreferenced tables are left.
        for (nth, _) in model.live.iter().filter(|(_, table)| table.kind == 1) {
            rest.remove(&self.places[nth]);
        }
        let mut rest: Vec<_> = rest.into_values().collect();
        rest.sort_unstable();
        unknown.sort_unstable();
        assert!(rest == unknown, "unreferenced tables have unexpected entries");
        let counts = self.tables.counts();
        let of_kind = |kind| model.live.values().filter(|table| table.kind == kind).count() as u64;
        assert_eq!((counts.directories, counts.small, counts.large), (of_kind(1), of_kind(2), of_kind(3)));
        assert_eq!((counts.bytes, self.tables.bytes_left()), (model.used(), model.limit - model.used()));
        assert!(model.used() <= model.limit);
        assert_eq!((counts.resident_bytes, counts.bindings), (resident as u64, model.bindings.len() as u64));
    }

    /// Returns the contents of all readable tables, by address.
    fn all_tables(&self) -> BTreeMap<u64, Vec<u8>> {
        let mut all = BTreeMap::new();
        for slot in 0..=self.most as u64 {
            let address = BASE + slot * SLOT_BYTES;
            let whole = [256 << 10, 64 << 10, 8 << 10].into_iter().find_map(|bytes| {
                let mut data = vec![0; bytes];
                self.tables.read(GuestVramAddr(address), &mut data).ok().map(|()| data)
            });
            all.extend(whole.map(|data| (address, data)));
        }
        all
    }

    /// Finds the addresses of tables by walking all directories, starting from handles and bindings.
    fn find_places(&mut self, actual: &BTreeMap<u64, Vec<u8>>) {
        let Self { tables, model, places, .. } = self;
        places.retain(|nth, _| model.live.contains_key(nth));
        let mut place = |nth: Nth, address: u64| {
            assert_eq!(*places.entry(nth).or_insert(address), address, "table {nth} has moved");
        };
        for (handle, nth) in &model.handles {
            let address = tables.address(TableId::new(*handle).unwrap());
            match model.live[nth].kind {
                1 => place(*nth, address.unwrap().0),
                _ => assert_eq!(address, Err(Status::WrongType)),
            }
        }
        for instance in INSTANCES {
            let bound = model.bindings.get(&instance);
            let directory = tables.directory_of(GuestVramAddr(instance));
            assert_eq!(directory.is_some(), bound.is_some());
            bound.zip(directory).into_iter().for_each(|(nth, address)| place(*nth, address.0));
        }
        let directories: Vec<_> = model.live.iter().filter(|(_, table)| table.kind == 1).collect();
        let addresses: Vec<_> = directories.iter().map(|(nth, _)| places[*nth]).collect();
        for ((_, table), address) in directories.into_iter().zip(addresses) {
            for (index, entry) in actual[&address].as_chunks::<8>().0.iter().enumerate() {
                let entry = u64::from_le_bytes(*entry);
                let (small, large) = table.names.get(&(index as u32)).copied().unwrap_or_default();
                let mut expected = 0;
                if let Some(small) = small {
                    let address = entry >> 36 << 12;
                    assert_eq!(*places.entry(small).or_insert(address), address);
                    expected |= 1 << 32 | address >> 12 << 36;
                }
                if let Some(large) = large {
                    let address = (entry >> 4 & 0xfff_ffff) << 12;
                    assert_eq!(*places.entry(large).or_insert(address), address);
                    expected |= 1 | address >> 12 << 4;
                }
                assert_eq!(entry, expected);
            }
        }
        let mut addresses: Vec<_> = places.values().collect();
        addresses.sort_unstable();
        addresses.dedup();
        assert_eq!(addresses.len(), places.len(), "two tables have the same address");
    }
}

fn contents(table: &Table) -> Vec<u8> {
    table.entries.iter().flat_map(|entry| entry.to_le_bytes()).collect()
}

/// Executes an operation on tables. Accepts all other operations without executing them.
fn execute(tables: &mut Tables, op: Op<'_>) -> Result<(), Status> {
    match op {
        Op::TableCreate { table, kind } => tables.create(table, kind),
        Op::TableDestroy { table } => tables.destroy(table),
        Op::DirectorySet { directory, index, small, large } => tables.set(directory, index, small, large),
        Op::EntriesRun { table, first, count, entry, step } => tables.run(table, first, count, entry, step),
        Op::EntriesList { table, first, entries } => tables.list(table, first, entries),
        Op::EntriesZero { table, first, count } => tables.zero(table, first, count),
        Op::DirectoryBind { directory: Some(directory), instance } => tables.bind(directory, instance),
        Op::DirectoryBind { directory: None, instance } => {
            tables.unbind(instance);
            Ok(())
        }
        Op::Flush { directory: Some(directory) } => tables.address(directory).map(|_| ()),
        _ => Ok(()),
    }
}
