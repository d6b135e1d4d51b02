//! An NBD server for one volume, with fixed newstyle negotiation and simple replies.
//!
//! Source: the protocol specification, `doc/proto.md` of the NBD project. Clients are not trusted: sizes are checked
//! before memory is allocated, the negotiation has a timeout, and a client that violates the protocol is disconnected.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::SECTOR_BYTES;
use crate::volume::Volume;

const MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// Handshake flag of both sides: fixed newstyle negotiation.
const FIXED_NEWSTYLE: u16 = 1;
/// Handshake flag of both sides: no padding after the export size.
const NO_ZEROES: u16 = 2;
/// Transmission flags of the export: flags present, flush, FUA, multiple connections.
const EXPORT_FLAGS: u16 = 1 | 4 | 8 | 1 << 8;
/// Command flag of a write that must be on stable storage before the reply (FUA).
const FORCE_UNIT_ACCESS: u16 = 1;

/// Maximum size of a request's data in bytes.
pub const MAX_REQUEST_BYTES: u32 = 32 << 20;
/// Preferred request size in bytes.
const PREFERRED_BYTES: u32 = 4 << 10;
/// Maximum size of an option's data in bytes.
const MAX_OPTION_BYTES: u32 = 8 << 10;
const MAX_SKIPPED_BYTES: u32 = 64 << 10;
/// Maximum number of options that a client may send.
const MAX_OPTIONS: u32 = 64;
/// Timeout of each read during the negotiation.
const NEGOTIATION_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for sending a reply to a client.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Options and option reply types.
mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO_REPLY: u32 = 3;
    pub const UNSUPPORTED: u32 = 1 << 31 | 1;
    pub const INVALID: u32 = 1 << 31 | 3;
    pub const UNKNOWN: u32 = 1 << 31 | 6;
    pub const TOO_BIG: u32 = 1 << 31 | 9;
    /// Information type: the export.
    pub const INFO_EXPORT: u16 = 0;
    /// Information type: block sizes.
    pub const INFO_BLOCK_SIZE: u16 = 3;
}

/// Commands.
mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
}

/// Error numbers of the protocol.
mod error {
    pub const IO: u32 = 5;
    pub const INVALID: u32 = 22;
    pub const NO_SPACE: u32 = 28;
    pub const OVERFLOW: u32 = 75;
}

fn violation(why: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

/// Serves one client until it disconnects.
///
/// # Errors
/// Returns an error if the connection fails, or the client violates the protocol.
pub fn serve(stream: UnixStream, volume: &Volume) -> io::Result<()> {
    stream.set_read_timeout(Some(NEGOTIATION_TIMEOUT))?;
    stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
    let mut client = Client { stream: io::BufReader::new(stream), volume };
    if client.negotiate()? {
        // A client may be idle for any length of time.
        client.stream.get_ref().set_read_timeout(None)?;
        client.transmit()?;
    }
    Ok(())
}

struct Client<'a> {
    stream: io::BufReader<UnixStream>,
    volume: &'a Volume,
}

impl Client<'_> {
    fn read<const BYTES: usize>(&mut self) -> io::Result<[u8; BYTES]> {
        let mut bytes = [0; BYTES];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn read16(&mut self) -> io::Result<u16> {
        self.read().map(u16::from_be_bytes)
    }

    fn read32(&mut self) -> io::Result<u32> {
        self.read().map(u32::from_be_bytes)
    }

    fn read64(&mut self) -> io::Result<u64> {
        self.read().map(u64::from_be_bytes)
    }

    fn send(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        self.stream.get_mut().write_all(&parts.concat())
    }

    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let skipped = io::copy(&mut (&mut self.stream).take(bytes), &mut io::sink())?;
        if skipped == bytes { Ok(()) } else { Err(ErrorKind::UnexpectedEof.into()) }
    }

    fn option_reply(&mut self, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        let length = (data.len() as u32).to_be_bytes();
        let magic = OPTION_REPLY_MAGIC.to_be_bytes();
        self.send(&[&magic, &option.to_be_bytes(), &kind.to_be_bytes(), &length, data])
    }

    /// Negotiates the options. Returns true if the client selected the export.
    fn negotiate(&mut self) -> io::Result<bool> {
        let flags = FIXED_NEWSTYLE | NO_ZEROES;
        self.send(&[&MAGIC.to_be_bytes(), &OPTION_MAGIC.to_be_bytes(), &flags.to_be_bytes()])?;
        let flags = self.read32()?;
        if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
            return Err(violation("unknown flags"));
        }
        for _ in 0..MAX_OPTIONS {
            if self.read64()? != OPTION_MAGIC {
                return Err(violation("not an option"));
            }
            let (option, length) = (self.read32()?, self.read32()?);
            if length > MAX_OPTION_BYTES {
                if length > MAX_SKIPPED_BYTES || option == option::EXPORT_NAME {
                    return Err(violation("an option that is too long"));
                }
                self.skip(length.into())?;
                self.option_reply(option, option::TOO_BIG, b"the option is too long")?;
                continue;
            }
            let mut data = vec![0; length as usize];
            self.stream.read_exact(&mut data)?;
            match option {
                option::EXPORT_NAME if data.is_empty() => {
                    let padding: &[u8] = if flags & u32::from(NO_ZEROES) == 0 { &[0; 124] } else { &[] };
                    let bytes = self.volume.bytes().to_be_bytes();
                    self.send(&[&bytes, &EXPORT_FLAGS.to_be_bytes(), padding])?;
                    return Ok(true);
                }
                // The protocol has no reply for this error.
                option::EXPORT_NAME => return Err(violation("an unknown export")),
                option::ABORT => {
                    self.option_reply(option, option::ACK, &[])?;
                    return Ok(false);
                }
                option::LIST if data.is_empty() => {
                    // The only export has an empty name.
                    self.option_reply(option, option::SERVER, &0u32.to_be_bytes())?;
                    self.option_reply(option, option::ACK, &[])?;
                }
                option::INFO | option::GO => {
                    if self.inform(option, &data)? && option == option::GO {
                        return Ok(true);
                    }
                }
                option::LIST => self.option_reply(option, option::INVALID, b"LIST has no data")?,
                _ => self.option_reply(option, option::UNSUPPORTED, &[])?,
            }
        }
        Err(violation("too many options"))
    }

    /// Replies to `INFO` and `GO`. Returns false if the reply is an error.
    fn inform(&mut self, option: u32, data: &[u8]) -> io::Result<bool> {
        let Some((name, requests)) = split_request(data) else {
            self.option_reply(option, option::INVALID, b"the option has another length")?;
            return Ok(false);
        };
        if !name.is_empty() {
            self.option_reply(option, option::UNKNOWN, b"the only export has the empty name")?;
            return Ok(false);
        }
        let kind = option::INFO_EXPORT.to_be_bytes();
        let bytes = self.volume.bytes().to_be_bytes();
        self.option_reply(option, option::INFO_REPLY, &[&kind[..], &bytes, &EXPORT_FLAGS.to_be_bytes()].concat())?;
        let asks_for_sizes = requests.as_chunks().0.iter().any(|kind| *kind == option::INFO_BLOCK_SIZE.to_be_bytes());
        if asks_for_sizes {
            let sizes = [SECTOR_BYTES as u32, PREFERRED_BYTES, MAX_REQUEST_BYTES].map(u32::to_be_bytes).concat();
            let kind = option::INFO_BLOCK_SIZE.to_be_bytes();
            self.option_reply(option, option::INFO_REPLY, &[&kind[..], &sizes].concat())?;
        }
        self.option_reply(option, option::ACK, &[])?;
        Ok(true)
    }

    fn transmit(&mut self) -> io::Result<()> {
        loop {
            let magic = match self.read32() {
                // A client may close the connection between requests.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
                result => result?,
            };
            if magic != REQUEST_MAGIC {
                return Err(violation("not a request"));
            }
            let (flags, kind) = (self.read16()?, self.read16()?);
            let (cookie, offset, length) = (self.read64()?, self.read64()?, self.read32()?);
            let mut data = Vec::new();
            let code = match kind {
                command::READ if length > MAX_REQUEST_BYTES => error::OVERFLOW,
                command::READ => {
                    data = vec![0; length as usize];
                    self.check(offset, length).unwrap_or_else(|| code(self.volume.read(offset, &mut data)))
                }
                command::WRITE if length > MAX_REQUEST_BYTES => {
                    // Before it could reply, the server would have to read all of the data.
                    return Err(violation("a write that is too long"));
                }
                command::WRITE => self.write(flags, offset, length)?,
                command::FLUSH => code(self.volume.flush()),
                command::DISCONNECT => return Ok(()),
                _ => error::INVALID,
            };
            let data: &[u8] = if code == 0 { &data } else { &[] };
            self.send(&[&REPLY_MAGIC.to_be_bytes(), &code.to_be_bytes(), &cookie.to_be_bytes(), data])?;
        }
    }

    fn write(&mut self, flags: u16, offset: u64, length: u32) -> io::Result<u32> {
        let mut data = vec![0; length as usize];
        self.stream.read_exact(&mut data)?;
        if let Some(code) = self.check(offset, length) {
            return Ok(if code == error::OVERFLOW { error::NO_SPACE } else { code });
        }
        let written = self.volume.write(offset, &mut data);
        let flushed = written.and_then(|()| if flags & FORCE_UNIT_ACCESS == 0 { Ok(()) } else { self.volume.flush() });
        Ok(code(flushed))
    }

    /// Returns an error number if a range is not within the volume or does not consist of whole sectors.
    fn check(&self, offset: u64, length: u32) -> Option<u32> {
        let sector = SECTOR_BYTES as u64;
        let is_inside = offset.checked_add(length.into()).is_some_and(|end| end <= self.volume.bytes());
        let is_whole = offset.is_multiple_of(sector) && u64::from(length).is_multiple_of(sector) && length > 0;
        if !is_inside {
            Some(error::OVERFLOW)
        } else if !is_whole {
            Some(error::INVALID)
        } else {
            None
        }
    }
}

fn code(result: io::Result<()>) -> u32 {
    match result.map_err(|error| error.kind()) {
        Ok(()) => 0,
        Err(ErrorKind::StorageFull) => error::NO_SPACE,
        Err(ErrorKind::InvalidInput) => error::INVALID,
        Err(_) => error::IO,
    }
}

/// Splits the data of `INFO` and `GO` into the export name and the 16-bit information types.
fn split_request(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    let (name, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
    let (count, kinds) = rest.split_first_chunk::<2>()?;
    (kinds.len() == 2 * usize::from(u16::from_be_bytes(*count))).then_some((name, kinds))
}
