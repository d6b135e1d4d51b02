//! Checks that the fuzz target's seed corpus equals the output of [`seeds`], and that every seed runs.
//!
//! `UPDATE_SEEDS=1 cargo test -p vmm-glue --test seeds` rewrites the corpus.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;

use vmm_glue::client::{multi_body, write_body};
use vmm_glue::fuzz::{Step, decode, encode, run};
use vmm_glue::protocol::{
    Command, DmaMap, DmaUnmap, FEATURE_DMA_LOGGING_REPORT, FEATURE_DMA_LOGGING_START, FEATURE_DMA_LOGGING_STOP,
    FEATURE_GET, FEATURE_MIG_DEVICE_STATE, FEATURE_MIGRATION, FEATURE_PROBE, FEATURE_SET, FLAG_NO_REPLY, Header,
    IrqSet, LoggingRange, LoggingReport, LoggingStart, MigData, RegionAccess, RegionInfoBody, STATE_RESUMING,
    STATE_RUNNING, STATE_STOP, STATE_STOP_COPY,
};
use zerocopy::IntoBytes;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/vfio_user_server")
}

#[test]
fn corpus_in_the_repository_is_up_to_date() {
    let (folder, seeds) = (folder(), seeds());
    if std::env::var_os("UPDATE_SEEDS").is_some() {
        std::fs::create_dir_all(&folder).unwrap();
        for (name, bytes) in &seeds {
            std::fs::write(folder.join(name), bytes).unwrap();
        }
    }
    let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.collect::<BTreeSet<_>>(), seeds.keys().map(|name| (*name).to_owned()).collect());
    for (name, bytes) in &seeds {
        assert!(std::fs::read(folder.join(name)).unwrap() == *bytes, "{name}; UPDATE_SEEDS=1 rewrites it");
    }
}

#[test]
fn seeds_survive_decoding_and_run() {
    for (name, bytes) in seeds() {
        assert_eq!(encode(&decode(&bytes)), bytes, "{name}");
        run(&bytes);
    }
}

fn request(command: Command, flags: u32, fds: u8, kind: u8, body: &[u8]) -> Step {
    let narrow = |value: u32| u8::try_from(value).unwrap_or(0);
    Step::Message { command: narrow(command.0.into()), flags: narrow(flags), fds, kind, body: body.to_vec() }
}

/// Returns the seeds by name: short client sessions that cover every command.
fn seeds() -> HashMap<&'static str, Vec<u8>> {
    let map = |gpa: u64, size: u64, kind: Option<u8>| {
        let body = DmaMap { argsz: 32, flags: 3, offset: 0, address: gpa, size };
        request(Command::DMA_MAP, 0, u8::from(kind.is_some()), kind.unwrap_or(0), body.as_bytes())
    };
    let unmap = |flags: u32, address: u64, size: u64| {
        request(Command::DMA_UNMAP, 0, 0, 0, DmaUnmap { argsz: 24, flags, address, size }.as_bytes())
    };
    let irqs = |flags: u32, index: u32, start: u32, count: u32, fds: u8| {
        let body = IrqSet { argsz: 20, flags, index, start, count };
        request(Command::DEVICE_SET_IRQS, 0, fds, 0, body.as_bytes())
    };
    let read = |region: u32, offset: u64, count: u32| {
        request(Command::REGION_READ, 0, 0, 0, RegionAccess { offset, region, count }.as_bytes())
    };
    let write = |flags: u32, region: u32, offset: u64, data: &[u8]| {
        request(Command::REGION_WRITE, flags, 0, 0, &write_body(region, offset, data))
    };
    let numbers = |values: &[u32]| values.as_bytes().to_vec();
    let probe = vec![
        request(Command::DEVICE_GET_INFO, 0, 0, 0, &numbers(&[16, 0, 0, 0])),
        request(Command::DEVICE_GET_REGION_INFO, 0, 0, 0, &numbers(&[32, 0, 0, 0, 0, 0, 0, 0])),
        request(Command::DEVICE_GET_REGION_INFO, 0, 0, 0, &numbers(&[32, 0, 9, 0, 0, 0, 0, 0])),
        request(Command::DEVICE_GET_IRQ_INFO, 0, 0, 0, &numbers(&[16, 0, 1, 0])),
        read(7, 0, 256),
        request(Command::DEVICE_RESET, 0, 0, 0, &[]),
    ];
    let accesses = vec![
        write(0, 0, 0x40, &[1, 2, 3, 4]),
        write(FLAG_NO_REPLY, 0, 0x44, &[1, 2, 3, 4, 5, 6, 7, 8]),
        write(0, 0, 3, &[1, 2, 3, 4, 5, 6, 7]),
        read(0, 0x40, 4),
        read(6, 0, 4096),
        read(0, 0x1ff8, 8),
        read(0, 0x1ffe, 4),
        write(0, 6, 0, &[0]),
        request(Command::REGION_WRITE_MULTI, FLAG_NO_REPLY, 0, 0, &multi_body(&[(0, 0, &[1; 8]), (0, 8, &[2; 4])])),
        request(Command::REGION_WRITE_MULTI, 0, 0, 0, &multi_body(&[(0, 0, &[1; 8]), (9, 8, &[2; 4])])),
    ];
    let memory = vec![
        map(0, 0x8000, Some(1)),
        map(0x8000, 0x4000, Some(2)),
        map(0x10000, 0x4000, None),
        map(0x4000, 0x8000, Some(1)),
        map(0xf000, 0x1000, None),
        Step::Touch(0),
        Step::Touch(9),
        unmap(0, 0, 0x8000),
        unmap(0, 0x8000, 0x1000),
        unmap(2, 0, 0),
        map(0, 0x2_0000, Some(1)),
    ];
    let withdrawn = vec![map(0, 0x8000, Some(2)), Step::Touch(4), Step::Truncate(1), Step::Touch(4), Step::Touch(0)];
    let interrupts = vec![
        irqs(0x24, 0, 0, 1, 1),
        Step::Interrupt(1),
        irqs(0x11, 0, 0, 1, 0),
        Step::Interrupt(0),
        irqs(0x21, 0, 0, 0, 0),
        irqs(0x24, 1, 0, 3, 3),
        Step::Interrupt(2),
        Step::Interrupt(5),
        irqs(0x24, 1, 3, 1, 1),
        irqs(0x14, 0, 0, 1, 1),
        irqs(0x22, 1, 0, 2, 0),
        irqs(0x21, 1, 0, 0, 0),
    ];
    let requests = vec![
        map(0, 0x8000, None),
        Step::Dma(0, 100),
        Step::Answer(0),
        Step::Dma(1, 9000),
        Step::Answer(1),
        Step::Answer(200),
        Step::Answer(7),
        Step::Dma(2, 1),
        Step::Reconnect,
    ];
    let shared = vec![map(0, 0x8000, Some(1)), Step::CheckShared, Step::Answer(1), Step::Answer(1), Step::Touch(0)];
    let unsupported = (0..20)
        .map(|number| request(Command(number), 0, 0, 0, &[0; 40]))
        .chain([request(Command::DEVICE_RESET, 0, 2, 0, &[])])
        .collect();
    let header = |size: u32| Header::request(1, Command::REGION_READ, size, 0).as_bytes().to_vec();
    let framing = vec![
        Step::Raw(header(32)),
        Step::Raw(vec![0; 16]),
        Step::Raw(header(6000)),
        Step::Raw(vec![0; 5984]),
        Step::Raw(header(15)),
        Step::Raw(header(u32::MAX)),
        Step::Raw(vec![0; 3]),
        Step::Reconnect,
        read(0, 0, 4),
    ];
    let describe = |flags: u32, index: u32, argsz: u32| {
        let body = RegionInfoBody { argsz, index, ..Default::default() };
        request(Command::DEVICE_GET_REGION_INFO, flags, 0, 0, body.as_bytes())
    };
    let mappable = vec![
        describe(0, 1, 32),
        describe(0, 1, 79),
        describe(0, 1, 80),
        describe(FLAG_NO_REPLY, 1, 80),
        describe(0, 1, 31),
        describe(0, 0, u32::MAX),
        describe(0, u32::MAX, 80),
        request(Command::DEVICE_GET_REGION_INFO, 0, 0, 0, &numbers(&[80, 0, 1])),
        write(0, 1, 0x2000, &[1, 2, 3, 4]),
        read(1, 0, 4),
        Step::Reconnect,
        describe(0, 1, 0x1000),
    ];
    let seeds: [(&str, Vec<Step>); 11] = [
        ("migration", migration()),
        ("probe", probe),
        ("accesses", accesses),
        ("memory", memory),
        ("withdrawn", withdrawn),
        ("interrupts", interrupts),
        ("requests", requests),
        ("shared", shared),
        ("unsupported", unsupported),
        ("framing", framing),
        ("mappable", mappable),
    ];
    seeds.into_iter().map(|(name, steps)| (name, encode(&steps))).collect()
}

/// Returns the steps of a client that saves the device's state, restores another state, and queries written memory.
fn migration() -> Vec<Step> {
    let feature = |flags: u32, argsz: u32, data: &[u8]| {
        request(Command::DEVICE_FEATURE, 0, 0, 0, &[argsz.as_bytes(), flags.as_bytes(), data].concat())
    };
    let state = |state: u32| feature(FEATURE_MIG_DEVICE_STATE | FEATURE_SET, 64, [state, 0].as_bytes());
    let read = |size: u32| {
        let body = MigData { argsz: size.saturating_add(8), size };
        request(Command::MIG_DATA_READ, 0, 0, 0, body.as_bytes())
    };
    let write = |said: u32, len: usize| {
        let body = [MigData { argsz: 8, size: said }.as_bytes(), &vec![1; len]].concat();
        request(Command::MIG_DATA_WRITE, 0, 0, 0, &body)
    };
    let start = LoggingStart { page_size: 4096, num_ranges: 1, reserved: 0 };
    let start = [start.as_bytes(), LoggingRange { iova: 0, length: 0x8000 }.as_bytes()].concat();
    let report = |iova, length, page_size| {
        let asked = LoggingReport { iova, length, page_size };
        feature(FEATURE_DMA_LOGGING_REPORT | FEATURE_GET, 4096, asked.as_bytes())
    };
    vec![
        feature(FEATURE_MIGRATION | FEATURE_PROBE | FEATURE_GET, 8, &[]),
        feature(FEATURE_MIGRATION | FEATURE_GET, 16, &[]),
        state(STATE_STOP_COPY),
        read(60),
        read(4096),
        read(4097),
        state(STATE_RUNNING),
        read(8),
        write(8, 8),
        state(STATE_RESUMING),
        write(50, 50),
        write(50, 51),
        write(50, 50),
        state(STATE_STOP),
        state(STATE_RESUMING),
        write(100, 100),
        write(1, 1),
        state(STATE_RUNNING),
        feature(FEATURE_MIG_DEVICE_STATE | FEATURE_GET, 16, &[]),
        request(Command::DEVICE_RESET, 0, 0, 0, &[]),
        report(0, 0x8000, 4096),
        feature(FEATURE_DMA_LOGGING_START | FEATURE_SET, 64, &start),
        report(0, 0x8000, 4096),
        report(0x10_0000, 0x4000_0000, 1 << 21),
        report(0, u64::MAX, 1 << 62),
        state(STATE_STOP),
        feature(FEATURE_DMA_LOGGING_STOP | FEATURE_SET, 8, &[]),
        state(7),
        Step::Reconnect,
        feature(FEATURE_MIG_DEVICE_STATE | FEATURE_GET, 16, &[]),
    ]
}
