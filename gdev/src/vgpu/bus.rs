//! A driver's accesses to a vGPU's registers and memory, and their implementation over a vfio-user socket.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvspec::regs::{pbus, windows::pramin};
use vmm_glue::RegionIndex;
use vmm_glue::client::{Client, ClientError};

use crate::{Error, Result};

/// Time without a reply after which the daemon is considered lost. A daemon upgrade takes less than a second.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// Error number with which a daemon rejects a second client.
const EBUSY: u32 = libc::EBUSY as u32;
/// vfio-user index of the MSI interrupt.
const MSI: u32 = 1;
const CONFIG: u32 = RegionIndex::Config as u32;
const BAR0: u32 = RegionIndex::Bar0 as u32;
const BAR1: u32 = RegionIndex::Bar1 as u32;
/// Offset of the command register in configuration space.
const COMMAND: u64 = 4;
/// Command register bits that enable memory decoding and bus mastering.
const COMMAND_ENABLE: u16 = 6;
/// Offset of the MSI control register in configuration space.
const MSI_CONTROL: u64 = 0x6a;
/// MSI control register bit that enables MSI.
const MSI_ENABLE: u16 = 1;
/// Maximum size of a VRAM access in bytes. Smaller accesses delay other work of the device less.
const VRAM_ACCESS_BYTES: usize = 4096;
/// Granularity of the PRAMIN base in bytes.
const WINDOW_BYTES: u64 = 0x1_0000;

/// A driver's access to its vGPU. The device has been reset, and its memory decoding, bus mastering and MSI are
/// enabled.
pub trait Bus: Debug + Send {
    /// Reads configuration space from offset 0.
    ///
    /// # Errors
    /// Returns an error if the device is lost.
    fn read_config(&mut self, bytes: &mut [u8]) -> Result<()>;

    /// Reads the 32-bit register at a BAR0 offset.
    ///
    /// # Errors
    /// Returns an error if the device is lost.
    fn read32(&mut self, offset: u32) -> Result<u32>;

    /// Writes the 32-bit register at a BAR0 offset.
    ///
    /// # Errors
    /// Returns an error if the device is lost.
    fn write32(&mut self, offset: u32, value: u32) -> Result<()>;

    /// Writes a 32-bit word through BAR1.
    ///
    /// # Errors
    /// Returns an error if the device is lost.
    fn write_bar1(&mut self, offset: u64, value: u32) -> Result<()>;

    /// Writes `bytes` at VRAM address `at`.
    ///
    /// # Errors
    /// Returns an error if the device is lost.
    fn write_vram(&mut self, at: u64, bytes: &[u8]) -> Result<()>;

    /// Fills `bytes` from VRAM address `at`.
    ///
    /// # Errors
    /// Returns an error if the device is lost.
    fn read_vram(&mut self, at: u64, bytes: &mut [u8]) -> Result<()>;

    /// Maps the first `bytes` bytes of a file at a guest-physical address, for DMA by the device.
    ///
    /// # Errors
    /// Returns an error if the device rejects the memory or is lost.
    fn map_ram(&mut self, gpa: u64, bytes: u64, file: &OwnedFd) -> Result<()>;

    /// Unmaps memory from the device.
    ///
    /// # Errors
    /// Returns an error if the device is lost.
    fn unmap_ram(&mut self, gpa: u64, bytes: u64) -> Result<()>;

    /// Zeroes `bytes` bytes at VRAM address `at`.
    ///
    /// # Errors
    /// Returns an error if the device is lost.
    fn zero_vram(&mut self, at: u64, bytes: u64) -> Result<()> {
        let zeros = [0; VRAM_ACCESS_BYTES];
        for offset in (0..bytes).step_by(VRAM_ACCESS_BYTES) {
            let left = (bytes - offset).min(VRAM_ACCESS_BYTES as u64) as usize;
            self.write_vram(at + offset, &zeros[..left])?;
        }
        Ok(())
    }

    /// Writes a 32-bit word at VRAM address `at`.
    ///
    /// # Errors
    /// Returns an error if the device is lost.
    fn write_vram32(&mut self, at: u64, value: u32) -> Result<()> {
        self.write_vram(at, &value.to_le_bytes())
    }
}

/// A connection to the daemon that serves a vGPU.
#[derive(Debug)]
pub(super) struct Connection {
    client: Client,
    socket: PathBuf,
    /// PRAMIN base in units of 64 KiB. `None` until this connection has set it.
    window: Option<u32>,
}

/// Returns the error for a socket that cannot be used.
pub(super) fn cannot_open(socket: &Path, why: String) -> Error {
    Error::Open {
        device: format!("vgpu:{}", socket.display()),
        why,
        remedy: "check with `mediatorctl vm list` that the VM exists, has no other client, and that this user may open \
                 its socket",
    }
}

impl Connection {
    /// Connects as a VMM does, resets the device, and enables its interrupt. Also returns the interrupt's eventfd.
    /// Returns `None` if the vGPU has another client.
    ///
    /// # Errors
    /// Returns an error if no daemon serves the socket, or if the daemon rejects the connection.
    pub(super) fn connect(socket: &Path) -> Result<Option<(Self, OwnedFd)>> {
        let connect = || -> Result<(Client, OwnedFd), ClientError> {
            let mut client = Client::connect_silent(socket)?;
            client.set_timeout(Some(REPLY_TIMEOUT))?;
            client.negotiate(0, 1, vmm_glue::client::QEMU_CAPABILITIES)?;
            let msi = client.attach_irqs(MSI, 1)?.remove(0);
            client.reset()?;
            client.post(CONFIG, COMMAND, &COMMAND_ENABLE.to_le_bytes())?;
            client.post(CONFIG, MSI_CONTROL, &MSI_ENABLE.to_le_bytes())?;
            Ok((client, msi))
        };
        match connect() {
            Ok((client, msi)) => Ok(Some((Self { client, socket: socket.to_owned(), window: None }, msi))),
            Err(ClientError::Refused(EBUSY)) => Ok(None),
            Err(ClientError::Io(error)) => Err(cannot_open(socket, error.to_string())),
            Err(other) => Err(cannot_open(socket, other.to_string())),
        }
    }

    fn failed(&self, what: &'static str, error: ClientError) -> Error {
        let socket = self.socket.display();
        match error {
            ClientError::Refused(errno) => Error::Driver {
                what: format!("{what} of the vGPU at {socket}"),
                source: io::Error::from_raw_os_error(errno.cast_signed()),
            },
            ClientError::Io(error) => Error::Lost(format!("the daemon at {socket}: {error}")),
            other => Error::Lost(format!("the daemon at {socket}: {other}")),
        }
    }

    /// Moves the PRAMIN window to a VRAM address. Returns the address's BAR0 offset, from which at least
    /// [`VRAM_ACCESS_BYTES`] bytes are accessible.
    fn show(&mut self, at: u64) -> Result<u64> {
        let window = (at / WINDOW_BYTES) as u32;
        if self.window != Some(window) {
            self.write32(pbus::PRAMIN_WINDOW::OFFSET, window)?;
            self.window = Some(window);
        }
        Ok(u64::from(pramin::BASE) + at % WINDOW_BYTES)
    }
}

impl Bus for Connection {
    fn read_config(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.client.read(CONFIG, 0, bytes).map_err(|error| self.failed("a read of the configuration", error))
    }

    fn read32(&mut self, offset: u32) -> Result<u32> {
        self.client.read32(BAR0, offset.into()).map_err(|error| self.failed("a read", error))
    }

    fn write32(&mut self, offset: u32, value: u32) -> Result<()> {
        let written = self.client.post(BAR0, offset.into(), &value.to_le_bytes());
        written.map_err(|error| self.failed("a write", error))
    }

    fn write_bar1(&mut self, offset: u64, value: u32) -> Result<()> {
        self.client.post(BAR1, offset, &value.to_le_bytes()).map_err(|error| self.failed("a write", error))
    }

    fn write_vram(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        for (at, piece) in (at..).step_by(VRAM_ACCESS_BYTES).zip(bytes.chunks(VRAM_ACCESS_BYTES)) {
            let offset = self.show(at)?;
            self.client.post(BAR0, offset, piece).map_err(|error| self.failed("a write of memory", error))?;
        }
        Ok(())
    }

    fn read_vram(&mut self, at: u64, bytes: &mut [u8]) -> Result<()> {
        for (at, piece) in (at..).step_by(VRAM_ACCESS_BYTES).zip(bytes.chunks_mut(VRAM_ACCESS_BYTES)) {
            let offset = self.show(at)?;
            self.client.read(BAR0, offset, piece).map_err(|error| self.failed("a read of memory", error))?;
        }
        Ok(())
    }

    fn map_ram(&mut self, gpa: u64, bytes: u64, file: &OwnedFd) -> Result<()> {
        let mapped = self.client.dma_map(gpa, bytes, true, Some((file.as_fd(), 0)));
        mapped.map_err(|error| self.failed("mapping RAM", error))
    }

    fn unmap_ram(&mut self, gpa: u64, bytes: u64) -> Result<()> {
        self.client.dma_unmap(gpa, bytes).map(drop).map_err(|error| self.failed("unmapping RAM", error))
    }
}
