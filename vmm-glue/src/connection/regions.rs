//! Checks and executes region accesses.

use rustix::io::Errno;
use zerocopy::FromBytes;

use super::Outbox;
use super::session::{Refusal, Session, refuse, too_short};
use crate::counters::add;
use crate::device::{AccessError, Ack, Device, RegionIndex};
use crate::pieces::{next, piece};
use crate::protocol::{Header, MultiWrite, RegionAccess};

impl Session {
    pub(super) fn region_read(
        &mut self,
        device: &mut dyn Device,
        header: &Header,
        body: &[u8],
        out: &mut Outbox,
    ) -> Result<(), Refusal> {
        let access = RegionAccess::read_from_prefix(body).map_err(|_| too_short(body, size_of::<RegionAccess>()))?.0;
        let (index, count) = self.check(&access, false)?;
        add(&self.link.counters().region_reads, 1);
        if header.no_reply() {
            return Ok(());
        }
        let read = out.reply_with(header, &access, count, |data| {
            let mut rest = data;
            let mut offset = access.offset;
            while !rest.is_empty() {
                let len = piece(offset, rest.len());
                let (head, tail) = rest.split_at_mut(len);
                device.region_read(index, offset, head)?;
                offset = next(offset, len);
                rest = tail;
            }
            Ok(())
        });
        read.map_err(|error| self.denied(error, &access))
    }

    pub(super) fn region_write(
        &mut self,
        device: &mut dyn Device,
        header: &Header,
        body: &[u8],
        out: &mut Outbox,
    ) -> Result<(), Refusal> {
        let (access, data) =
            RegionAccess::read_from_prefix(body).map_err(|_| too_short(body, size_of::<RegionAccess>()))?;
        self.write(device, &access, data, !header.no_reply())?;
        if !header.no_reply() {
            out.reply(header, &access, &[]);
        }
        Ok(())
    }

    pub(super) fn region_write_multi(
        &mut self,
        device: &mut dyn Device,
        header: &Header,
        body: &[u8],
        out: &mut Outbox,
    ) -> Result<(), Refusal> {
        let (count, writes) = u64::read_from_prefix(body).map_err(|_| too_short(body, size_of::<u64>()))?;
        let (writes, rest) = writes.as_chunks::<{ size_of::<MultiWrite>() }>();
        if u64::try_from(writes.len()) != Ok(count) || !rest.is_empty() {
            let reason = format!("a batch of {count} writes has {} bytes", body.len());
            return refuse(Errno::INVAL, reason);
        }
        // Each write was separate in the client, so execute the remaining writes even if one fails.
        let mut failed = None;
        let mut done = 0u64;
        for bytes in writes {
            add(&self.link.counters().batched_writes, 1);
            let Ok(MultiWrite { offset, region, count, data }) = MultiWrite::read_from_bytes(bytes) else { continue };
            let written = match usize::try_from(count).ok().and_then(|count| data.get(..count)) {
                Some(data) => self.write(device, &RegionAccess { offset, region, count }, data, false),
                None => refuse(Errno::INVAL, format!("a write of {count} bytes in a batch; it must have 1 to 8 bytes")),
            };
            match written {
                Ok(()) => done = done.saturating_add(1),
                Err(refusal) => failed = failed.or(Some(refusal)),
            }
        }
        if let Some(refusal) = failed {
            return Err(refusal);
        }
        if !header.no_reply() {
            out.reply(header, &done, &[]);
        }
        Ok(())
    }

    /// Executes a write. `awaited` is true if the client blocks until the reply. Deferred work is then left to
    /// [`Session::complete_deferred`], unless the write was split.
    fn write(
        &mut self,
        device: &mut dyn Device,
        access: &RegionAccess,
        data: &[u8],
        awaited: bool,
    ) -> Result<(), Refusal> {
        let (index, count) = self.check(access, true)?;
        if data.len() != count {
            return refuse(
                Errno::INVAL,
                format!("the client sent {} bytes of data for a {count}-byte write", data.len()),
            );
        }
        add(&self.link.counters().region_writes, 1);
        self.configured |= index == RegionIndex::Config;
        let mut rest = data;
        let mut offset = access.offset;
        while !rest.is_empty() {
            let len = piece(offset, rest.len());
            let (head, tail) = rest.split_at(len);
            match device.region_write(index, offset, head).map_err(|error| self.denied(error, access))? {
                Ack::Deferred(deferred) if awaited && len == data.len() => self.deferred = Some(deferred),
                ack => ack.complete_now(device),
            }
            offset = next(offset, len);
            rest = tail;
        }
        Ok(())
    }

    /// Validates an access. Returns its region and length.
    fn check(&self, access: &RegionAccess, write: bool) -> Result<(RegionIndex, usize), Refusal> {
        let RegionAccess { offset, region, count } = *access;
        let index = RegionIndex::from_wire(region);
        let Some((index, info)) = index.and_then(|index| Some((index, self.regions.get(usize::from(index as u8))?)))
        else {
            return refuse(Errno::INVAL, format!("region {region} does not exist"));
        };
        let allowed = if write { info.writable() } else { info.readable() };
        if info.size() != 0 && !allowed {
            let how = if write { "written" } else { "read" };
            return refuse(Errno::ACCESS, format!("{index:?} cannot be {how}"));
        }
        let len = usize::try_from(count).unwrap_or(usize::MAX);
        if len == 0 || len > self.max_transfer {
            return refuse(
                Errno::INVAL,
                format!("an access of {count} bytes; it must have 1 to {} bytes", self.max_transfer),
            );
        }
        if offset.checked_add(u64::from(count)).is_none_or(|end| end > info.size()) {
            let reason = format!("{count} bytes at {offset:#x} exceed {index:?}, which has {:#x} bytes", info.size());
            return refuse(Errno::INVAL, reason);
        }
        Ok((index, len))
    }

    fn denied(&self, error: AccessError, access: &RegionAccess) -> Refusal {
        add(&self.link.counters().denied, 1);
        let errno = match error {
            AccessError::Denied => Errno::ACCESS,
            AccessError::Invalid => Errno::INVAL,
            AccessError::Failed => Errno::IO,
        };
        let RegionAccess { offset, region, count } = access;
        Refusal { errno, reason: format!("{error}: {count} bytes at {offset:#x} of region {region}") }
    }
}
