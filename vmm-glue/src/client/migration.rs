//! Migration requests sent by a client.

use zerocopy::{FromBytes, IntoBytes};

use super::{Client, ClientError, Result, length, parse};
use crate::protocol::{
    Command, DeviceFeature, FEATURE_DMA_LOGGING_REPORT, FEATURE_DMA_LOGGING_START, FEATURE_DMA_LOGGING_STOP,
    FEATURE_GET, FEATURE_MIG_DEVICE_STATE, FEATURE_MIGRATION, FEATURE_SET, LoggingReport, LoggingStart, MigData,
    MigDeviceState,
};

/// Maximum size of a reply to a feature request, in bytes.
const MAX_ANSWER_BYTES: u32 = 1 << 20;

impl Client {
    /// Sends an unchecked `DEVICE_FEATURE` request. Returns the size of the full reply, and its data.
    pub fn feature(&mut self, flags: u32, argsz: u32, data: &[u8]) -> Result<(u32, Vec<u8>)> {
        let body = DeviceFeature { argsz, flags };
        let reply = self.request(Command::DEVICE_FEATURE, &[body.as_bytes(), data].concat(), &[])?;
        let (said, data) = parse::<DeviceFeature>(&reply.body)?;
        if said.flags != flags {
            return Err(ClientError::Protocol(format!("flags {:#x} instead of {flags:#x}", said.flags)));
        }
        Ok((said.argsz, data.to_vec()))
    }

    /// Queries the migration states that the device supports.
    pub fn migration_flags(&mut self) -> Result<u64> {
        let (_, data) = self.feature(FEATURE_MIGRATION | FEATURE_GET, MAX_ANSWER_BYTES, &[])?;
        parse::<u64>(&data).map(|(flags, _)| flags)
    }

    /// Queries the migration state.
    pub fn device_state(&mut self) -> Result<u32> {
        let (_, data) = self.feature(FEATURE_MIG_DEVICE_STATE | FEATURE_GET, MAX_ANSWER_BYTES, &[])?;
        parse::<MigDeviceState>(&data).map(|(state, _)| state.device_state)
    }

    /// Sets the migration state.
    pub fn set_device_state(&mut self, device_state: u32) -> Result<()> {
        let state = MigDeviceState { device_state, data_fd: 0 };
        self.feature(FEATURE_MIG_DEVICE_STATE | FEATURE_SET, MAX_ANSWER_BYTES, state.as_bytes()).map(drop)
    }

    /// Reads up to `size` bytes of the device's state. Returns fewer bytes only at the end of the state.
    pub fn migration_read(&mut self, size: u32) -> Result<Vec<u8>> {
        let body = MigData { argsz: size.saturating_add(8), size };
        let reply = self.request(Command::MIG_DATA_READ, body.as_bytes(), &[])?;
        let (said, data) = parse::<MigData>(&reply.body)?;
        if length(data.len()) != said.size || said.size > size || said.argsz != said.size.saturating_add(8) {
            return Err(ClientError::Protocol(format!(
                "the server sent {} bytes of state, but announced {}",
                data.len(),
                said.size
            )));
        }
        Ok(data.to_vec())
    }

    /// Reads all of the device's state, `size` bytes at a time.
    pub fn migration_read_all(&mut self, size: u32) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        loop {
            let part = self.migration_read(size)?;
            all.extend_from_slice(&part);
            if length(part.len()) < size {
                return Ok(all);
            }
        }
    }

    /// Writes part of a device's state.
    pub fn migration_write(&mut self, data: &[u8]) -> Result<()> {
        let body = MigData { argsz: 8, size: length(data.len()) };
        self.request(Command::MIG_DATA_WRITE, &[body.as_bytes(), data].concat(), &[]).map(drop)
    }

    /// Starts logging the device's writes to all memory. Returns the page size in bytes.
    pub fn start_logging(&mut self) -> Result<u64> {
        let start = LoggingStart { page_size: 4096, ..Default::default() };
        let (_, data) = self.feature(FEATURE_DMA_LOGGING_START | FEATURE_SET, MAX_ANSWER_BYTES, start.as_bytes())?;
        parse::<LoggingStart>(&data).map(|(start, _)| start.page_size)
    }

    /// Stops logging.
    pub fn stop_logging(&mut self) -> Result<()> {
        self.feature(FEATURE_DMA_LOGGING_STOP | FEATURE_SET, MAX_ANSWER_BYTES, &[]).map(drop)
    }

    /// Queries which pages of a range have been written since the last query. Returns one flag per page.
    pub fn written(&mut self, iova: u64, length: u64, page_size: u64) -> Result<Vec<bool>> {
        let asked = LoggingReport { iova, length, page_size };
        let (_, data) = self.feature(FEATURE_DMA_LOGGING_REPORT | FEATURE_GET, MAX_ANSWER_BYTES, asked.as_bytes())?;
        let (_, bits) = LoggingReport::read_from_prefix(&data)
            .map_err(|_| ClientError::Protocol(format!("a report of {} bytes", data.len())))?;
        let pages = usize::try_from(length.div_ceil(page_size)).unwrap_or(usize::MAX);
        let bit = |page: usize| bits.get(page / 8).is_some_and(|byte| byte >> (page % 8) & 1 != 0);
        Ok((0..pages).map(bit).collect())
    }
}
