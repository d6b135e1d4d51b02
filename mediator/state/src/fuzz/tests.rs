use super::*;
use crate::sample::{Nothing, card};
use crate::{SavedTenancy, SavedVm};
use channels::Pause;
use proptest::prelude::*;
use saved_state::Writer;
use saved_state::stream::StreamWriter;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const IDENTITY: [u8; 16] = *b"a card of a test";

fn file_of(card: &SavedCard) -> Vec<u8> {
    let mut writer = Writer::new(IDENTITY);
    card.write(&mut writer).unwrap();
    writer.finish()
}

fn read(bytes: &[u8]) -> SavedCard {
    let mut file = SavedState::parse(bytes, &SavedCard::known()).unwrap();
    let card = SavedCard::read(&mut file).unwrap();
    file.finish().unwrap();
    card
}

fn refused(edit: impl FnOnce(&mut SavedCard)) -> String {
    let mut card = card();
    edit(&mut card);
    card.restore(&mut Host).expect_err("the card was restored").to_string()
}

#[test]
fn a_card_is_as_it_was() {
    let bytes = file_of(&card());
    let restored = read(&bytes).restore(&mut Host).unwrap();
    assert_eq!(restored.vms.len(), 2);
    let vms = restored.vms.into_iter().map(|(vm, one)| SavedVm {
        vm,
        gpu: one.gpu.save(),
        spaces: one.spaces.save(),
        tables: one.tables.map(|tables| tables.save()),
        pool: one.pool.save(),
    });
    let again = SavedCard {
        chunks: restored.chunks.save(),
        balancer: restored.balancer.save(),
        tenancy: SavedTenancy { scheduler: restored.scheduler.save(), quanta: restored.quanta.save() },
        channels: restored.channels.save(),
        pool: restored.pool.save(),
        segments: Vec::new(),
        vms: vms.collect(),
    };
    assert!(file_of(&again) == bytes);
}

#[test]
fn vms_that_have_changed_places_are_refused() {
    // Each part is valid by itself.
    assert!(refused(|card| card.vms.swap(0, 1)).contains("not in ascending order"));
    assert!(
        refused(|card| {
            let (one, other) = card.vms.split_at_mut(1);
            std::mem::swap(&mut one[0].spaces, &mut other[0].spaces);
        })
        .contains("not owned by the VM")
    );
    // With swapped memory, the channels of one VM would use the tables of the other VM.
    assert!(
        refused(|card| {
            let (one, other) = card.vms.split_at_mut(1);
            std::mem::swap(&mut one[0].spaces, &mut other[0].spaces);
            std::mem::swap(&mut one[0].pool, &mut other[0].pool);
        })
        .contains("which belongs to another VM")
    );
    assert!(
        refused(|card| {
            let pool = card.vms[0].pool.clone();
            card.vms[1].pool = pool;
        })
        .contains("VM 2: chunk")
    );
    assert!(refused(|card| drop(card.vms.pop())).contains("differ from the VMs"));
}

#[test]
fn a_guest_that_sees_other_channels_is_refused() {
    let mut gpu = VGpu::new(config()).unwrap();
    assert!(refused(|card| card.vms[0].gpu = gpu.save()).contains("view of channel 3 differs"));
    let larger = VGpuConfig { vram_bytes: 2 * VRAM, ..config() };
    gpu = VGpu::new(larger).unwrap();
    assert!(refused(|card| card.vms[0].gpu = gpu.save()).contains("a different configuration"));
}

#[test]
fn a_vm_that_is_not_to_be_there_is_refused() {
    struct Fewer;
    impl Surroundings for Fewer {
        fn own(&self) -> (u32, u32) {
            Host.own()
        }
        fn layout(&self) -> Layout {
            Host.layout()
        }
        fn now_ns(&self) -> u64 {
            Host.now_ns()
        }
        fn vm(&self, vm: TenantId) -> Option<VmSurroundings> {
            Host.vm(vm).filter(|_| vm == TenantId(1))
        }
        fn write(&mut self, _: VramAddr, _: &[u8]) {}
    }
    let error = card().restore(&mut Fewer).unwrap_err().to_string();
    assert!(error.contains("VM 2: the VM is not configured"), "{error}");
}

/// Returns the seeds of the fuzz target: parts of the sample card, a whole file, a stream, and channels during a
/// migration.
fn seeds() -> BTreeMap<&'static str, Vec<u8>> {
    fn seed(what: u8, part: &impl saved_state::Part) -> Vec<u8> {
        [vec![what], postcard::to_allocvec(part).unwrap()].concat()
    }
    let card = card();
    BTreeMap::from([
        ("file", [vec![0], file_of(&card)].concat()),
        ("chunks", seed(1, &card.chunks)),
        ("quanta", seed(2, &card.tenancy.quanta)),
        ("channels", seed(3, &card.channels)),
        ("scheduler", seed(4, &card.tenancy.scheduler)),
        ("registers", seed(5, &card.vms[0].gpu)),
        ("tables", seed(6, card.vms[0].tables.as_ref().unwrap())),
        ("stream", [vec![7, 99], stream(&file_of(&card))].concat()),
        ("moving", seed(8, &moving())),
    ])
}

/// Returns the stream of a VM with memory at two addresses.
fn stream(head: &[u8]) -> Vec<u8> {
    let (mut writer, mut bytes) = StreamWriter::new(head);
    bytes.extend(writer.piece(0, &[1; 100]));
    bytes.extend(writer.piece(0x10_0000, &[2; 30]));
    bytes.extend(writer.end());
    bytes
}

/// Returns the channels of the first VM during a migration.
fn moving() -> SavedMoving {
    let mut channels = Channels::restored(card().channels, Host.layout()).unwrap();
    channels.pause(&mut Nothing::default(), TenantId(1), Pause::Standstill, true);
    channels.moving(&mut Nothing::default(), TenantId(1)).unwrap().save().unwrap()
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus/state")
}

/// Checks that the seed files contain the current version of each part. If they differ because a part's format has
/// changed, the part needs a new version.
#[test]
fn seeds_in_the_repository_are_up_to_date() {
    let seeds = seeds();
    if std::env::var_os("UPDATE_SEEDS").is_some() {
        std::fs::create_dir_all(folder()).unwrap();
        for (name, bytes) in &seeds {
            std::fs::write(folder().join(name), bytes).unwrap();
        }
    }
    for (name, bytes) in &seeds {
        let kept = std::fs::read(folder().join(name)).unwrap();
        assert!(
            kept == *bytes,
            "{name} is outdated; run UPDATE_SEEDS=1 cargo test -p card-state seeds, and consider a new version"
        );
    }
}

#[test]
fn saved_inputs_keep_invariants() {
    for entry in std::fs::read_dir(folder()).unwrap() {
        fuzz(&std::fs::read(entry.unwrap().path()).unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn edited_seeds_keep_invariants(
        which in any::<prop::sample::Index>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let seeds = seeds();
        let mut bytes = which.get(&seeds.into_values().collect::<Vec<_>>()).clone();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        fuzz(&bytes);
    }
}
