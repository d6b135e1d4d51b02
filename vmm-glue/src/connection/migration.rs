//! Executes requests that save or restore the device's state, or that query the memory written by the device.
//!
//! The session tracks the migration state, so it calls the device only in the order of states defined by [`Migration`].
//! It rejects invalid requests without side effects. If the device fails to change its state, the session assumes the
//! state that [`Migration`] defines for this error.

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use super::Outbox;
use super::session::{Refusal, Session, parse, refuse, too_short, wire_len};
use crate::device::Device;
use crate::migration::{Migration, MigrationError, State};
use crate::protocol::{
    DeviceFeature, FEATURE_DMA_LOGGING_REPORT, FEATURE_DMA_LOGGING_START, FEATURE_DMA_LOGGING_STOP, FEATURE_GET,
    FEATURE_MASK, FEATURE_MIG_DEVICE_STATE, FEATURE_MIGRATION, FEATURE_PROBE, FEATURE_SET, Header, LoggingRange,
    LoggingReport, LoggingStart, MIGRATION_STOP_COPY, MigData, MigDeviceState, STATE_ERROR,
};
use vmm_memory::memory::{LOG_BLOCK, PAGE_SIZE};

/// Migration state of a client's device.
#[derive(Debug, Default)]
pub(super) struct Migrating {
    state: State,
    /// Set while the device's writes to client memory are logged.
    logs: bool,
}

impl Migrating {
    /// Records a device reset, which aborts any migration.
    pub(super) fn was_reset(&mut self) {
        self.state = State::Running;
    }
}

impl From<MigrationError> for Refusal {
    fn from(error: MigrationError) -> Self {
        let MigrationError { errno, why } = error;
        Self { errno, reason: why }
    }
}

/// Returns the device's migration interface, or rejects the request if the device has none.
fn as_migration(device: &mut dyn Device) -> Result<&mut dyn Migration, Refusal> {
    // The kernel reports this error for a feature that a device lacks. The error makes a client block migration.
    device
        .migration()
        .ok_or_else(|| Refusal { errno: Errno::NOTTY, reason: "this device cannot be migrated".to_owned() })
}

impl Session {
    /// Executes a `DEVICE_FEATURE` request.
    pub(super) fn feature(
        &mut self,
        device: &mut dyn Device,
        header: &Header,
        body: &[u8],
        out: &mut Outbox,
    ) -> Result<(), Refusal> {
        let (request, data) =
            DeviceFeature::read_from_prefix(body).map_err(|_| too_short(body, size_of::<DeviceFeature>()))?;
        let DeviceFeature { argsz, flags } = request;
        let feature = flags & FEATURE_MASK;
        let known = match feature {
            FEATURE_MIGRATION | FEATURE_DMA_LOGGING_REPORT => FEATURE_GET,
            FEATURE_MIG_DEVICE_STATE => FEATURE_GET | FEATURE_SET,
            FEATURE_DMA_LOGGING_START | FEATURE_DMA_LOGGING_STOP => FEATURE_SET,
            _ => return refuse(Errno::NOTTY, format!("device feature {feature} does not exist")),
        };
        let migration = as_migration(device)?;
        let (probe, ways) = (flags & FEATURE_PROBE != 0, flags & (FEATURE_GET | FEATURE_SET));
        if flags & !(FEATURE_MASK | FEATURE_PROBE | known) != 0
            || (!probe && !matches!(ways, FEATURE_GET | FEATURE_SET))
        {
            return refuse(Errno::INVAL, format!("invalid flags {flags:#x} for device feature {feature}"));
        }
        if probe {
            return answer(header, argsz, flags, data, out);
        }
        let data = match (feature, ways) {
            (FEATURE_MIGRATION, _) => MIGRATION_STOP_COPY.as_bytes().to_vec(),
            (FEATURE_MIG_DEVICE_STATE, FEATURE_GET) => self.device_state().as_bytes().to_vec(),
            (FEATURE_MIG_DEVICE_STATE, _) => {
                let MigDeviceState { device_state, .. } = parse(data)?;
                self.go_to(migration, device_state)?;
                self.device_state().as_bytes().to_vec()
            }
            (FEATURE_DMA_LOGGING_START, _) => self.start_logging(migration, data)?,
            (FEATURE_DMA_LOGGING_STOP, _) => {
                if !std::mem::take(&mut self.migration.logs) {
                    return refuse(Errno::INVAL, "writes to client memory are not logged");
                }
                migration.log_writes(false);
                self.link.memory().writes().set(false);
                Vec::new()
            }
            _ => {
                let asked = parse(data)?;
                let bytes = self.report_bytes(&asked)?;
                let all = size_of::<DeviceFeature>().saturating_add(size_of::<LoggingReport>()).saturating_add(bytes);
                // The client does not receive a report that does not fit, so keep these writes in the log.
                if wire_len(all) > argsz {
                    return answer(header, wire_len(all), flags, &[], out);
                }
                let mut report = asked.as_bytes().to_vec();
                report.extend(self.report(migration, &asked, bytes));
                report
            }
        };
        let all = wire_len(size_of::<DeviceFeature>().saturating_add(data.len()));
        answer(header, all, flags, if all > argsz && ways == FEATURE_GET { &[] } else { &data }, out)
    }

    fn device_state(&self) -> MigDeviceState {
        MigDeviceState { device_state: self.migration.state.to_wire(), data_fd: 0 }
    }

    /// Moves the device to a state, through intermediate states.
    fn go_to(&mut self, device: &mut dyn Migration, number: u32) -> Result<(), Refusal> {
        let Some(to) = State::from_wire(number) else {
            let what =
                if number == STATE_ERROR { "is not a state that a client can request" } else { "is not supported" };
            return refuse(Errno::INVAL, format!("state {number} of migration {what}"));
        };
        // The new state may contain the configuration space of another device.
        self.configured = true;
        while self.migration.state != to {
            let state = self.migration.state;
            let next = state.toward(to);
            let failed = |error: MigrationError, left: State| (Refusal::from(error), left);
            let gone = match (state, next) {
                (State::Error, _) => {
                    return refuse(Errno::IO, "the device failed while loading a state and must be reset");
                }
                (State::Running, _) => device.stop().map_err(|error| failed(error, State::Running)),
                (State::StopCopy, _) => {
                    device.end_saving();
                    Ok(())
                }
                (State::Resuming, _) => device.end_loading().map_err(|error| failed(error, State::Error)),
                (State::Stop, State::StopCopy) => device.begin_saving().map_err(|error| failed(error, State::Stop)),
                (State::Stop, State::Resuming) => device.begin_loading().map_err(|error| failed(error, State::Error)),
                (State::Stop, _) => {
                    device.start();
                    Ok(())
                }
            };
            match gone {
                Ok(()) => self.migration.state = next,
                Err((refusal, left)) => {
                    self.migration.state = left;
                    return Err(refusal);
                }
            }
        }
        Ok(())
    }

    /// Reads the device's state.
    pub(super) fn migration_read(
        &mut self,
        device: &mut dyn Device,
        header: &Header,
        body: &[u8],
        out: &mut Outbox,
    ) -> Result<(), Refusal> {
        let MigData { argsz, size } = parse(body)?;
        let migration = as_migration(device)?;
        self.in_state(State::StopCopy, "read")?;
        let len = self.piece(size)?;
        let all = wire_len(size_of::<MigData>().saturating_add(len));
        if argsz < all {
            return refuse(
                Errno::INVAL,
                format!("the reply has {size} bytes of state, but the client accepts only {argsz} bytes"),
            );
        }
        let mut data = vec![0; len];
        let written = migration.save(&mut data)?;
        data.truncate(written);
        if !header.no_reply() {
            let argsz = wire_len(size_of::<MigData>().saturating_add(data.len()));
            out.reply(header, &MigData { argsz, size: wire_len(data.len()) }, &data);
        }
        Ok(())
    }

    /// Loads part of another device's state into this device.
    pub(super) fn migration_write(&mut self, device: &mut dyn Device, body: &[u8]) -> Result<(), Refusal> {
        let (MigData { argsz: _, size }, data) =
            MigData::read_from_prefix(body).map_err(|_| too_short(body, size_of::<MigData>()))?;
        let migration = as_migration(device)?;
        self.in_state(State::Resuming, "written")?;
        let len = self.piece(size)?;
        if len != data.len() {
            return refuse(
                Errno::INVAL,
                format!("the client sent {} bytes of state, but announced {size}", data.len()),
            );
        }
        Ok(migration.load(data)?)
    }

    fn in_state(&self, state: State, done: &str) -> Result<(), Refusal> {
        let now = self.migration.state;
        if now != state {
            return refuse(
                Errno::INVAL,
                format!("a device's state is {done} in migration state {state:?}, but the device is in {now:?}"),
            );
        }
        Ok(())
    }

    /// Returns the size of a part of the state in bytes, or rejects a part that is too large.
    fn piece(&self, size: u32) -> Result<usize, Refusal> {
        let len = usize::try_from(size).unwrap_or(usize::MAX);
        if len > self.max_transfer {
            return refuse(Errno::INVAL, format!("{size} bytes of state exceed the maximum of {}", self.max_transfer));
        }
        Ok(len)
    }

    /// Starts logging the device's writes. The log covers all memory, regardless of the ranges that the client
    /// requests.
    fn start_logging(&mut self, device: &mut dyn Migration, data: &[u8]) -> Result<Vec<u8>, Refusal> {
        let (start, rest) =
            LoggingStart::read_from_prefix(data).map_err(|_| too_short(data, size_of::<LoggingStart>()))?;
        let LoggingStart { page_size, num_ranges, reserved: _ } = start;
        let (ranges, _) = rest.as_chunks::<{ size_of::<LoggingRange>() }>();
        let count = usize::try_from(num_ranges).unwrap_or(usize::MAX);
        let ranges =
            ranges.get(..count).ok_or_else(|| too_short(rest, count.saturating_mul(size_of::<LoggingRange>())))?;
        let is_range = |bytes: &[u8; 16]| {
            let range = LoggingRange::read_from_bytes(bytes).unwrap_or_default();
            range.length != 0 && range.iova.checked_add(range.length.saturating_sub(1)).is_some()
        };
        if !page_size.is_power_of_two() || !ranges.iter().all(is_range) {
            return refuse(Errno::INVAL, format!("invalid page size of {page_size} bytes, or an invalid range"));
        }
        if self.migration.logs {
            return refuse(Errno::INVAL, "writes to client memory are already logged");
        }
        self.link.memory().writes().set(true);
        device.log_writes(true);
        self.migration.logs = true;
        let mut answer = LoggingStart { page_size: LOG_BLOCK, ..start }.as_bytes().to_vec();
        answer.extend_from_slice(ranges.as_flattened());
        Ok(answer)
    }

    /// Returns the size of a report's bitmap, in bytes.
    fn report_bytes(&self, asked: &LoggingReport) -> Result<usize, Refusal> {
        let LoggingReport { iova, length, page_size } = *asked;
        if !self.migration.logs {
            return refuse(Errno::INVAL, "writes to client memory are not logged");
        }
        if !page_size.is_power_of_two() || page_size < PAGE_SIZE || length == 0 || iova.checked_add(length).is_none() {
            return refuse(
                Errno::INVAL,
                format!("{length:#x} bytes at {iova:#x} are not a range of {page_size}-byte pages"),
            );
        }
        let words = length.div_ceil(page_size).div_ceil(64);
        let bytes = usize::try_from(words.saturating_mul(8)).unwrap_or(usize::MAX);
        if bytes > self.max_transfer {
            return refuse(
                Errno::INVAL,
                format!("a bitmap of {bytes} bytes exceeds the maximum of {}", self.max_transfer),
            );
        }
        Ok(bytes)
    }

    /// Returns the bitmap of writes in a range. The bitmap is `bytes` bytes long.
    fn report(&self, device: &mut dyn Migration, asked: &LoggingReport, bytes: usize) -> Vec<u8> {
        let LoggingReport { iova, length, page_size } = *asked;
        let end = iova.saturating_add(length);
        let mut words = vec![0u64; bytes.div_ceil(8)];
        let mut note = |written: std::ops::Range<u64>| {
            let (from, to) = (written.start.max(iova), written.end.min(end));
            let page = |at: u64| at.saturating_sub(iova).checked_div(page_size).unwrap_or(0);
            if from < to {
                (page(from)..=page(to.saturating_sub(1))).for_each(|page| {
                    let word = usize::try_from(page / 64).ok().and_then(|word| words.get_mut(word));
                    word.into_iter().for_each(|word| *word |= 1u64.wrapping_shl((page % 64) as u32));
                });
            }
        };
        device.take_written(iova..end, &mut note);
        self.link.memory().writes().take(&(iova..end), &mut note);
        words.as_bytes().to_vec()
    }
}

/// Replies to a `DEVICE_FEATURE` request with the body's size, the flags, and the data.
fn answer(header: &Header, argsz: u32, flags: u32, data: &[u8], out: &mut Outbox) -> Result<(), Refusal> {
    if !header.no_reply() {
        out.reply(header, &DeviceFeature { argsz, flags }, data);
    }
    Ok(())
}
