//! Tests a client that migrates a device over a real socket.

mod support;

use std::ops::Range;
use std::sync::{Arc, Mutex};

use support::*;
use vmm_glue::client::{Client, ClientError};
use vmm_glue::device::NUM_REGIONS;
use vmm_glue::protocol::{
    Command, DeviceFeature, FEATURE_DMA_LOGGING_REPORT, FEATURE_DMA_LOGGING_START, FEATURE_DMA_LOGGING_STOP,
    FEATURE_GET, FEATURE_MIG_DEVICE_STATE, FEATURE_MIGRATION, FEATURE_PROBE, FEATURE_SET, FLAG_NO_REPLY, LoggingRange,
    LoggingReport, LoggingStart, MIGRATION_STOP_COPY, MigData, MigDeviceState, STATE_ERROR, STATE_RESUMING,
    STATE_RUNNING, STATE_STOP, STATE_STOP_COPY,
};
use vmm_glue::{AccessError, Ack, Device, DmaRegion, MapError, Migration, MigrationError, RegionIndex, RegionInfo};
use zerocopy::IntoBytes;

const MIB: u64 = 1 << 20;

/// A device whose state is its BAR0. It records the order of its calls.
#[derive(Default)]
struct Movable {
    bar0: Vec<u8>,
    at: usize,
    coming: Vec<u8>,
    calls: Arc<Mutex<Vec<&'static str>>>,
    written: Vec<Range<u64>>,
    link: Option<vmm_glue::Link>,
}

impl Movable {
    fn told(&self, what: &'static str) {
        self.calls.lock().unwrap().push(what);
    }
}

impl Migration for Movable {
    fn stop(&mut self) -> Result<(), MigrationError> {
        self.told("stop");
        Ok(())
    }

    fn start(&mut self) {
        self.told("start");
    }

    fn begin_saving(&mut self) -> Result<(), MigrationError> {
        self.told("begin_saving");
        self.at = 0;
        if self.bar0[0] == 0xee { Err(MigrationError::failed("the device refuses")) } else { Ok(()) }
    }

    fn save(&mut self, data: &mut [u8]) -> Result<usize, MigrationError> {
        let rest = &self.bar0[self.at..];
        let len = rest.len().min(data.len());
        data[..len].copy_from_slice(&rest[..len]);
        self.at += len;
        Ok(len)
    }

    fn end_saving(&mut self) {
        self.told("end_saving");
    }

    fn begin_loading(&mut self) -> Result<(), MigrationError> {
        self.told("begin_loading");
        self.coming.clear();
        Ok(())
    }

    fn load(&mut self, data: &[u8]) -> Result<(), MigrationError> {
        self.coming.extend_from_slice(data);
        if self.coming.len() > self.bar0.len() { Err(MigrationError::invalid("too much")) } else { Ok(()) }
    }

    fn end_loading(&mut self) -> Result<(), MigrationError> {
        self.told("end_loading");
        if self.coming.len() != self.bar0.len() {
            return Err(MigrationError::invalid("the state is truncated"));
        }
        self.bar0 = std::mem::take(&mut self.coming);
        Ok(())
    }

    fn log_writes(&mut self, on: bool) {
        self.told(if on { "log" } else { "the log is stopped" });
    }

    fn take_written(&mut self, range: Range<u64>, each: &mut dyn FnMut(Range<u64>)) {
        self.written.drain(..).filter(|at| at.start < range.end && range.start < at.end).for_each(each);
    }
}

impl Device for Movable {
    fn regions(&self) -> [RegionInfo; NUM_REGIONS] {
        let mut regions: [RegionInfo; NUM_REGIONS] = Default::default();
        regions[0] = RegionInfo::read_write(BAR0_SIZE);
        regions
    }

    fn region_read(&mut self, _: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        data.copy_from_slice(&self.bar0[offset as usize..][..data.len()]);
        Ok(())
    }

    fn region_write(&mut self, _: RegionIndex, offset: u64, data: &[u8]) -> Result<Ack, AccessError> {
        self.bar0[offset as usize..][..data.len()].copy_from_slice(data);
        // A write at one of these offsets makes the device write client memory, either itself or through this process.
        match offset {
            0x100 => self.written.push(4 * MIB..6 * MIB),
            0x108 => drop(self.link.as_ref().map(|link| link.memory().write(9 * MIB, data))),
            _ => {}
        }
        Ok(Ack::Done)
    }

    fn dma_map(&mut self, _: &DmaRegion) -> Result<(), MapError> {
        Ok(())
    }

    fn dma_unmap(&mut self, _: u64, _: u64) {}

    fn migration(&mut self) -> Option<&mut dyn Migration> {
        Some(self)
    }

    fn reset(&mut self) {
        self.told("reset");
        self.bar0.fill(0);
    }

    fn disconnected(&mut self) {
        self.bar0.fill(0);
    }
}

fn movable(calls: &Arc<Mutex<Vec<&'static str>>>) -> (Host, Client) {
    let calls = Arc::clone(calls);
    let host = Host::start_device(|link| {
        Box::new(Movable { bar0: vec![0; BAR0_SIZE as usize], calls, link: Some(link), ..Movable::default() })
    });
    let client = host.client();
    (host, client)
}

fn errno<T: std::fmt::Debug>(result: Result<T, ClientError>) -> Option<u32> {
    result.unwrap_err().errno()
}

#[test]
fn state_that_was_read_from_one_device_is_that_of_another() {
    let calls = Arc::<Mutex<Vec<_>>>::default();
    let (_here, mut from) = movable(&calls);
    let (_there, mut to) = movable(&Arc::default());
    from.write32(0, 0x40, 0x1234_5678).unwrap();
    assert_eq!(from.migration_flags().unwrap(), MIGRATION_STOP_COPY);
    assert_eq!(from.device_state().unwrap(), STATE_RUNNING);
    from.set_device_state(STATE_STOP_COPY).unwrap();
    to.set_device_state(STATE_RESUMING).unwrap();
    let mut parts = 0;
    loop {
        let part = from.migration_read(1000).unwrap();
        to.migration_write(&part).unwrap();
        parts += 1;
        if part.len() < 1000 {
            break;
        }
    }
    assert_eq!(parts, BAR0_SIZE / 1000 + 1);
    assert!(from.migration_read(1000).unwrap().is_empty());
    to.set_device_state(STATE_RUNNING).unwrap();
    assert_eq!((to.device_state().unwrap(), to.read32(0, 0x40).unwrap()), (STATE_RUNNING, 0x1234_5678));
    from.set_device_state(STATE_RUNNING).unwrap();
    assert_eq!(*calls.lock().unwrap(), ["stop", "begin_saving", "end_saving", "start"]);
}

#[test]
fn every_state_is_reached_from_every_other_by_the_shortest_way() {
    let calls = Arc::<Mutex<Vec<_>>>::default();
    let (_host, mut client) = movable(&calls);
    let all = [STATE_STOP, STATE_RUNNING, STATE_STOP_COPY, STATE_RESUMING];
    // Load a complete state each time the device enters `STATE_RESUMING`.
    let go = |client: &mut Client, from, to| {
        client.set_device_state(to).unwrap();
        if from != to && to == STATE_RESUMING {
            client.migration_write(&vec![1; BAR0_SIZE as usize]).unwrap();
        }
    };
    let mut now = STATE_RUNNING;
    for from in all {
        for to in all {
            go(&mut client, now, from);
            now = to;
            calls.lock().unwrap().clear();
            go(&mut client, from, to);
            assert_eq!(client.device_state().unwrap(), to);
            let leaves = |state| match state {
                STATE_RUNNING => vec!["stop"],
                STATE_STOP_COPY => vec!["end_saving"],
                STATE_RESUMING => vec!["end_loading"],
                _ => vec![],
            };
            let enters = |state| match state {
                STATE_RUNNING => vec!["start"],
                STATE_STOP_COPY => vec!["begin_saving"],
                STATE_RESUMING => vec!["begin_loading"],
                _ => vec![],
            };
            let wanted = if from == to { Vec::new() } else { [leaves(from), enters(to)].concat() };
            assert_eq!(*calls.lock().unwrap(), wanted, "from {from} to {to}");
        }
    }
}

#[test]
fn out_of_order_or_oversized_requests_fail_and_change_nothing() {
    let (_host, mut client) = movable(&Arc::default());
    for state in [STATE_ERROR, 5, 6, 7, 8, u32::MAX] {
        assert_eq!(errno(client.set_device_state(state)), EINVAL, "state {state}");
    }
    for state in [STATE_RUNNING, STATE_STOP, STATE_STOP_COPY, STATE_RESUMING] {
        client.set_device_state(state).unwrap();
        if state != STATE_STOP_COPY {
            assert_eq!(errno(client.migration_read(8)), EINVAL);
        }
        if state != STATE_RESUMING {
            assert_eq!(errno(client.migration_write(&[1; 8])), EINVAL);
        }
    }
    let mut ask = |command, body: &[u8]| errno(client.request(command, body, &[]));
    // Send invalid sizes, and parts that exceed the maximum message size.
    let part = |argsz: u32, size: u32| MigData { argsz, size };
    assert_eq!(ask(Command::MIG_DATA_WRITE, part(8, 4).as_bytes()), EINVAL);
    assert_eq!(ask(Command::MIG_DATA_WRITE, &[part(8, 4).as_bytes(), &[0; 8]].concat()), EINVAL);
    assert_eq!(ask(Command::MIG_DATA_WRITE, &[0; 7]), EINVAL);
    assert_eq!(ask(Command::MIG_DATA_WRITE, part(8, u32::MAX).as_bytes()), EINVAL);
    client.migration_write(&vec![2; BAR0_SIZE as usize]).unwrap();
    client.set_device_state(STATE_STOP_COPY).unwrap();
    let mut ask = |command, body: &[u8]| errno(client.request(command, body, &[]));
    assert_eq!(ask(Command::MIG_DATA_READ, part(u32::MAX, u32::MAX).as_bytes()), EINVAL);
    assert_eq!(ask(Command::MIG_DATA_READ, part(u32::MAX, (1 << 20) + 1).as_bytes()), EINVAL);
    assert_eq!(ask(Command::MIG_DATA_READ, part(15, 8).as_bytes()), EINVAL);
    assert_eq!(ask(Command::MIG_DATA_READ, &[0; 4]), EINVAL);
    assert_eq!(client.migration_read_all(4096).unwrap(), vec![2; BAR0_SIZE as usize]);
}

#[test]
fn features_are_probed_got_and_set_as_a_kernel_has_it() {
    let (_host, mut client) = movable(&Arc::default());
    let mut feature = |flags: u32| client.feature(flags, 64, &[]);
    let ways = [
        (FEATURE_MIGRATION, FEATURE_GET),
        (FEATURE_MIG_DEVICE_STATE, FEATURE_GET | FEATURE_SET),
        (FEATURE_DMA_LOGGING_START, FEATURE_SET),
        (FEATURE_DMA_LOGGING_STOP, FEATURE_SET),
        (FEATURE_DMA_LOGGING_REPORT, FEATURE_GET),
    ];
    for (number, known) in ways {
        for way in [0, FEATURE_GET, FEATURE_SET, FEATURE_GET | FEATURE_SET] {
            let probed = feature(number | way | FEATURE_PROBE);
            if way & !known == 0 { drop(probed.unwrap()) } else { assert_eq!(errno(probed), EINVAL) }
        }
        assert_eq!(errno(feature(number)), EINVAL);
        assert_eq!(errno(feature(number | FEATURE_GET | FEATURE_SET)), EINVAL);
        assert_eq!(errno(feature(number | FEATURE_PROBE | 1 << 19)), EINVAL);
    }
    for number in [0, 3, 4, 5, 9, 0xffff] {
        assert_eq!(errno(feature(number | FEATURE_GET)), ENOTTY);
        assert_eq!(errno(feature(number | FEATURE_PROBE)), ENOTTY);
    }
    // If the client's buffer is too small, the reply contains the required size.
    assert_eq!(client.feature(FEATURE_MIGRATION | FEATURE_GET, 8, &[]).unwrap(), (16, Vec::new()));
    assert_eq!(client.feature(FEATURE_MIGRATION | FEATURE_GET, 16, &[]).unwrap().0, 16);
    assert_eq!(errno(client.request(Command::DEVICE_FEATURE, &[0; 7], &[])), EINVAL);
    let state = FEATURE_MIG_DEVICE_STATE | FEATURE_SET;
    assert_eq!(errno(client.feature(state, 64, &[0; 7])), EINVAL);
    let (head, stop) =
        (DeviceFeature { argsz: 64, flags: state }, MigDeviceState { device_state: STATE_STOP, data_fd: 0 });
    client.send(Command::DEVICE_FEATURE, FLAG_NO_REPLY, &[head.as_bytes(), stop.as_bytes()].concat(), &[]).unwrap();
    assert_eq!(client.device_state().unwrap(), STATE_STOP);
}

#[test]
fn device_given_invalid_state_fails_until_reset() {
    let (_host, mut client) = movable(&Arc::default());
    client.write32(0, 0x40, 7).unwrap();
    client.set_device_state(STATE_RESUMING).unwrap();
    client.migration_write(&[1; 100]).unwrap();
    assert_eq!(errno(client.set_device_state(STATE_RUNNING)), EINVAL);
    assert_eq!(client.device_state().unwrap(), STATE_ERROR);
    assert_eq!(errno(client.set_device_state(STATE_RUNNING)), Some(rustix::io::Errno::IO.raw_os_error() as u32));
    assert_eq!(errno(client.migration_read(8)), EINVAL);
    client.reset().unwrap();
    assert_eq!((client.device_state().unwrap(), client.read32(0, 0x40).unwrap()), (STATE_RUNNING, 0));
    // A device that cannot save its state remains stopped, and can run again.
    client.write32(0, 0, 0xee).unwrap();
    assert_eq!(errno(client.set_device_state(STATE_STOP_COPY)), Some(rustix::io::Errno::IO.raw_os_error() as u32));
    assert_eq!(client.device_state().unwrap(), STATE_STOP);
    client.set_device_state(STATE_RUNNING).unwrap();
}

#[test]
fn written_pages_are_reported_once() {
    use std::os::fd::AsFd;
    let calls = Arc::<Mutex<Vec<_>>>::default();
    let (_host, mut client) = movable(&calls);
    let file = vmm_glue::client::memory_file(16 * MIB, true).unwrap();
    client.dma_map(0, 16 * MIB, true, Some((file.as_fd(), 0))).unwrap();
    let set = |client: &mut Vec<bool>| {
        client.iter().enumerate().filter(|(_, bit)| **bit).map(|(at, _)| at).collect::<Vec<_>>()
    };
    assert_eq!(errno(client.written(0, 16 * MIB, MIB)), EINVAL, "no writes are logged");
    assert_eq!(errno(client.stop_logging()), EINVAL);
    assert_eq!(client.start_logging().unwrap(), 2 * MIB);
    assert_eq!(errno(client.start_logging()), EINVAL, "writes are already logged");
    client.write32(0, 0x100, 1).unwrap();
    client.write32(0, 0x108, 1).unwrap();
    assert_eq!(set(&mut client.written(0, 16 * MIB, MIB).unwrap()), [4, 5, 8, 9]);
    assert_eq!(set(&mut client.written(0, 16 * MIB, MIB).unwrap()), [0usize; 0]);
    client.write32(0, 0x108, 1).unwrap();
    // The server does not send a report that exceeds the client's buffer, so the bits stay in the log.
    let asked = LoggingReport { iova: 8 * MIB, length: 8 * MIB, page_size: 4096 };
    let report = FEATURE_DMA_LOGGING_REPORT | FEATURE_GET;
    assert_eq!(client.feature(report, 40, asked.as_bytes()).unwrap(), (8 + 24 + 256, Vec::new()));
    let pages = set(&mut client.written(8 * MIB, 8 * MIB, 4096).unwrap());
    assert_eq!((pages.first(), pages.last(), pages.len()), (Some(&0), Some(&511), 512));
    for (iova, length, page_size) in [
        (0, 0, 4096),
        (0, MIB, 4095),
        (0, MIB, 2048),
        (0, MIB, 0),
        (u64::MAX, MIB, 4096),
        (0, u64::MAX, 4096),
        (0, 1 << 50, 4096),
    ] {
        let asked = LoggingReport { iova, length, page_size };
        assert_eq!(errno(client.feature(report, 1 << 20, asked.as_bytes())), EINVAL, "{asked:?}");
    }
    client.stop_logging().unwrap();
    let ranges = [LoggingRange { iova: 0, length: MIB }, LoggingRange { iova: u64::MAX, length: 2 }];
    let start = |page_size, num_ranges, ranges: &[LoggingRange]| {
        [LoggingStart { page_size, num_ranges, reserved: 0 }.as_bytes(), ranges.as_bytes()].concat()
    };
    let on = FEATURE_DMA_LOGGING_START | FEATURE_SET;
    for wrong in
        [start(4096, 2, &ranges), start(3, 1, &ranges), start(4096, 3, &ranges), start(4096, u32::MAX, &ranges)]
    {
        assert_eq!(errno(client.feature(on, 1 << 20, &wrong)), EINVAL);
    }
    client.feature(on, 1 << 20, &start(4096, 1, &ranges)).unwrap();
    client.feature(FEATURE_DMA_LOGGING_STOP | FEATURE_SET, 8, &[]).unwrap();
    assert_eq!(*calls.lock().unwrap(), ["log", "the log is stopped", "log", "the log is stopped"]);
}
