//! A VM served over a daemon's socket. It resembles [`Guest`](super::Guest), but is accessed through vfio-user
//! messages.

use super::machine::{Machine, Ram};
use nvspec::regs::{pbus, windows::pramin};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::cell::RefCell;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;
use vmm_glue::RegionIndex;
use vmm_glue::client::{Client, ClientError};
use vmm_glue::protocol::{STATE_RESUMING, STATE_RUNNING, STATE_STOP_COPY};

/// Timeout of a wait, longer than any operation takes, even on a loaded host.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Index of the interrupt type MSI in the vfio-user protocol.
const MSI: u32 = 1;
const BAR0: u32 = RegionIndex::Bar0 as u32;
/// Size of each read of the device's state, in bytes.
const STATE_PART: u32 = 32 << 10;
/// Maximum size of a VRAM access in one message, in bytes.
const MESSAGE_BYTES: u64 = 4096;

/// A remote VM. Writes are posted, as in QEMU.
///
/// The device can disappear at any time, because an operator may remove the VM; [`Self::is_there`] then returns false.
/// Methods panic if the server does not respond or violates the protocol.
pub struct RemoteGuest {
    /// `None` once the device has disappeared.
    client: RefCell<Option<Client>>,
    msi: OwnedFd,
    ram: Ram,
    vram_bytes: u64,
}

impl RemoteGuest {
    /// Connects like a VMM, and enables MSI. The VM has `vram_bytes` bytes of VRAM.
    ///
    /// # Errors
    /// Returns an error if no server is listening, or if the server rejects the connection.
    pub fn connect(socket: &Path, vram_bytes: u64) -> Result<Self, ClientError> {
        let mut client = Client::connect(socket)?;
        client.set_timeout(Some(WAIT_TIMEOUT))?;
        let msi = client.attach_irqs(MSI, 1)?.remove(0);
        Ok(Self { client: RefCell::new(Some(client)), msi, ram: Ram::default(), vram_bytes })
    }

    /// Returns false if the server is known to have closed the connection. Sends no request.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.client.borrow().is_some()
    }

    /// Waits until the server has executed all posted writes. Returns false if the device has disappeared.
    pub fn settle(&mut self) -> bool {
        self.ask(|client| client.device_info().map(drop));
        self.is_there()
    }

    /// Sends a request to the server. Returns `None` if the server rejects it or no longer exists.
    fn ask<T>(&self, call: impl FnOnce(&mut Client) -> Result<T, ClientError>) -> Option<T> {
        let mut place = self.client.borrow_mut();
        match call(place.as_mut()?) {
            Ok(answer) => Some(answer),
            Err(ClientError::Refused(_)) => None,
            Err(ClientError::Closed) => {
                *place = None;
                None
            }
            Err(ClientError::Io(error)) if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                *place = None;
                None
            }
            Err(error) => panic!("unexpected response from the server: {error:?}"),
        }
    }

    /// Lends RAM in a new file to the device. Returns false if the device rejects it.
    pub fn map_ram(&mut self, gpa: u64, size: u64, writable: bool) -> bool {
        let (file, lent) = Ram::file(size).expect("a memory file");
        let mapped = self.ask(|client| client.dma_map(gpa, size, writable, Some((lent.as_fd(), 0)))).is_some();
        // The guest has this RAM even if the device cannot access it.
        self.ram.insert(gpa, size, file);
        mapped
    }

    /// Withdraws RAM. Returns its file, so that the RAM can still be read.
    pub fn unmap_ram(&mut self, gpa: u64) -> Option<OwnedFd> {
        let (size, file) = self.ram.remove(gpa)?;
        self.ask(|client| client.dma_unmap(gpa, size).map(drop));
        Some(file)
    }

    /// Resets the device as its client would.
    pub fn reset(&mut self) {
        self.ask(Client::reset);
    }

    /// Disables MSI, withdraws all lent memory, and closes the connection.
    pub fn leave(self) {
        self.ask(|client| client.disable_irqs(MSI));
        self.ask(Client::dma_unmap_all);
    }

    /// Migrates to an unused device, served at `socket`. The client stops this device, reads its state, and loads the
    /// state into the other device. The client also lends all of the VM's RAM to that device, readable and writable.
    /// Returns the size of the state in bytes.
    ///
    /// # Errors
    /// Returns an error if one of the servers rejects a request. This device may then be stopped. The other device is
    /// reset.
    pub fn migrate_to(&mut self, socket: &Path) -> Result<usize, ClientError> {
        let mut there = Client::connect(socket)?;
        there.set_timeout(Some(WAIT_TIMEOUT))?;
        let msi = there.attach_irqs(MSI, 1)?.remove(0);
        for (gpa, size, file) in self.ram.all() {
            there.dma_map(gpa, size, true, Some((file.as_fd(), 0)))?;
        }
        let state = {
            let mut place = self.client.borrow_mut();
            let here = place.as_mut().ok_or(ClientError::Closed)?;
            here.set_device_state(STATE_STOP_COPY)?;
            here.migration_read_all(STATE_PART)?
        };
        there.set_device_state(STATE_RESUMING)?;
        state.chunks(STATE_PART as usize).try_for_each(|part| there.migration_write(part))?;
        there.set_device_state(STATE_RUNNING)?;
        // The new client replaces the previous one completely.
        *self.client.borrow_mut() = Some(there);
        self.msi = msi;
        Ok(state.len())
    }

    /// Sets the migration state of the device, for a client that stops the device and then resumes it at the same
    /// server.
    pub fn set_device_state(&mut self, state: u32) -> Result<(), ClientError> {
        self.client.borrow_mut().as_mut().ok_or(ClientError::Closed)?.set_device_state(state)
    }

    /// Disconnects without a message, as if the client had been killed. Returns the files of the RAM.
    #[must_use]
    pub fn vanish(mut self) -> Vec<OwnedFd> {
        std::iter::from_fn(|| self.ram.remove(self.ram.first()?)).map(|(_, file)| file).collect()
    }
}

impl Machine for RemoteGuest {
    fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) {
        if self.ask(|client| client.read(region as u32, offset, data)).is_none() {
            data.fill(0xff);
        }
    }

    fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) {
        self.ask(|client| client.post(region as u32, offset, data));
    }

    fn vram_bytes(&self) -> u64 {
        self.vram_bytes
    }

    /// Reads through PRAMIN.
    fn vram_read(&self, at: u64, data: &mut [u8]) {
        for (at, data) in pieces(at, data.len()).zip(data.chunks_mut(MESSAGE_BYTES as usize)) {
            let (window, offset) = window(at);
            let read = self.ask(|client| {
                client.post(BAR0, pbus::PRAMIN_WINDOW::OFFSET.into(), &window.to_le_bytes())?;
                client.read(BAR0, offset, data)
            });
            if read.is_none() {
                data.fill(0xff);
            }
        }
    }

    /// Writes through PRAMIN.
    fn vram_write(&self, at: u64, data: &[u8]) {
        for (at, data) in pieces(at, data.len()).zip(data.chunks(MESSAGE_BYTES as usize)) {
            let (window, offset) = window(at);
            self.ask(|client| {
                client.post(BAR0, pbus::PRAMIN_WINDOW::OFFSET.into(), &window.to_le_bytes())?;
                client.post(BAR0, offset, data)
            });
        }
    }

    fn ram_read(&self, gpa: u64, data: &mut [u8]) {
        self.ram.read(gpa, data);
    }

    fn ram_write(&self, gpa: u64, data: &[u8]) {
        self.ram.write(gpa, data);
    }

    fn wait_msi(&self) -> bool {
        let mut place = self.client.borrow_mut();
        let Some(client) = &*place else { return false };
        let limit = Timespec::try_from(WAIT_TIMEOUT).expect("the timeout fits");
        let mut ready = [PollFd::new(&self.msi, PollFlags::IN), PollFd::new(client.stream(), PollFlags::IN)];
        loop {
            match poll(&mut ready, Some(&limit)) {
                Ok(0) => panic!("no interrupt in {} s", WAIT_TIMEOUT.as_secs()),
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(error) => panic!("waiting for an interrupt: {error}"),
            }
        }
        if !ready[0].revents().is_empty() {
            let mut count = [0; 8];
            assert_eq!(rustix::io::read(&self.msi, &mut count), Ok(count.len()));
            return true;
        }
        // No request is outstanding, so an event on the stream means that the connection has been closed.
        *place = None;
        false
    }

    /// Writes guest VRAM through PRAMIN in one message, like a VMM that combines posted writes.
    fn poke(&mut self, at: u64, value: u32) {
        let (window, offset) = window(at);
        let (window, value) = (window.to_le_bytes(), value.to_le_bytes());
        let writes: [(u32, u64, &[u8]); 2] =
            [(BAR0, pbus::PRAMIN_WINDOW::OFFSET.into(), &window), (BAR0, offset, &value)];
        self.ask(|client| client.post_many(&writes));
    }
}

/// Returns the PRAMIN window base for a VRAM address, and the resulting offset in BAR0. The window is far larger than a
/// message, so no access crosses its end.
fn window(at: u64) -> (u32, u64) {
    ((at >> 16) as u32, u64::from(pramin::BASE) + (at & 0xffff))
}

/// Returns the start addresses of the chunks into which an access to `len` bytes at `at` is split.
fn pieces(at: u64, len: usize) -> impl Iterator<Item = u64> {
    (at..at + len as u64).step_by(MESSAGE_BYTES as usize)
}
