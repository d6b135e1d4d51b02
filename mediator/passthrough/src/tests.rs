//! Tests a device with a vfio-user client and a card that records all accesses.

use super::*;
use card::{DmaError, Identity};
use nvspec::regs::windows::prom;
use parking_lot::Mutex;
use std::os::fd::AsFd;
use std::time::Duration;
use tempfile::TempDir;
use vmm_glue::client::{Client, memory_file, wait_event};
use vmm_glue::{IrqCounts, Server, ServerOptions, SocketOptions, StopHandle};

const BAR0: u32 = 0;
const BAR1: u32 = 1;
const CONFIG: u32 = 7;
/// Offset of the command register in configuration space.
const COMMAND: u64 = 4;
/// Command register bits: memory space and bus mastering.
const MASTER: u8 = 6;
/// Command register bits: memory space, bus mastering, and INTx disable.
const NO_INTX: u16 = 0x406;
/// Offset of the MSI control word.
const MSI_CONTROL: u64 = 0x6a;
/// Offset of the power management control word.
const POWER_CONTROL: u64 = 0x64;
/// Offset of the expansion ROM's BAR.
const ROM_BAR: u64 = 0x30;
/// Offset of the PCI Express device control word.
const DEVICE_CONTROL: u64 = 0x80;
/// Device control bit that initiates a function-level reset.
const INITIATE_RESET: u16 = 1 << 15;
const ROM: u32 = 6;
/// Interrupt types of the vfio-user protocol.
const INTX: u32 = 0;
const MSI: u32 = 1;
/// Register of the recording card. Reading it deasserts the interrupt pin.
const ACKNOWLEDGE: u32 = 0x100;
/// End of the recording card's address space.
const ADDRESS_LIMIT: u64 = 1 << 40;
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Default)]
struct State {
    registers: BTreeMap<u32, u32>,
    dma: BTreeMap<u64, u64>,
    event: Option<(InterruptMode, EventFd)>,
    pin: bool,
    masked: bool,
    resets: u32,
    /// PROM contents, which a reset does not change.
    rom: Vec<u8>,
    aperture: Vec<(Aperture, u64, Vec<u8>)>,
}

impl State {
    fn signal_pin(&mut self) {
        if let Some((InterruptMode::Intx, event)) = self.event.as_ref().filter(|_| self.pin && !self.masked) {
            event.write(1).unwrap();
            self.masked = true;
        }
    }
}

/// A card that records all accesses.
#[derive(Default)]
struct Recording(Mutex<State>);

impl Recording {
    fn set_pin(&self, level: bool) {
        let mut state = self.0.lock();
        state.pin = level;
        state.signal_pin();
    }

    fn message(&self) {
        let state = self.0.lock();
        let (mode, event) = state.event.as_ref().expect("interrupts are disabled");
        assert_eq!(*mode, InterruptMode::Msi);
        event.write(1).unwrap();
    }

    fn mode(&self) -> Option<InterruptMode> {
        self.0.lock().event.as_ref().map(|(mode, _)| *mode)
    }

    fn mapped(&self) -> Vec<(u64, u64)> {
        self.0.lock().dma.iter().map(|(&iova, &len)| (iova, len)).collect()
    }
}

impl Card for Recording {
    fn identity(&self) -> Identity {
        Identity {
            vendor: 0x10de,
            device: 0x06d8,
            subsystem_vendor: 0x10de,
            subsystem: 0x1234,
            revision: 0xa3,
            class: 0x03_02_00,
            bar0_size: 16 << 20,
            bar1_size: 128 << 20,
            bar3_size: 64 << 20,
        }
    }

    fn read32(&self, offset: u32) -> u32 {
        assert_eq!(offset % 4, 0);
        let mut state = self.0.lock();
        if offset == ACKNOWLEDGE {
            state.pin = false;
        }
        if let Some(bytes) = offset.checked_sub(prom::BASE).and_then(|at| state.rom.get(at as usize..)?.first_chunk()) {
            return u32::from_le_bytes(*bytes);
        }
        state.registers.get(&offset).copied().unwrap_or(0)
    }

    fn write32(&self, offset: u32, value: u32) {
        assert_eq!(offset % 4, 0);
        self.0.lock().registers.insert(offset, value);
    }

    fn aperture_read(&self, _: Aperture, offset: u64, data: &mut [u8]) {
        data.fill(offset as u8);
    }

    fn aperture_write(&self, aperture: Aperture, offset: u64, data: &[u8]) {
        self.0.lock().aperture.push((aperture, offset, data.to_vec()));
    }

    fn map_dma(&self, iova: u64, memory: DmaMemory) -> Result<(), DmaError> {
        let len = memory.len() as u64;
        if iova + len > ADDRESS_LIMIT {
            return Err(DmaError::OutOfReach { iova, len, bits: 40 });
        }
        self.0.lock().dma.insert(iova, len);
        Ok(())
    }

    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), DmaError> {
        match self.0.lock().dma.remove(&iova) {
            Some(found) if found == len => Ok(()),
            _ => Err(DmaError::NotMapped { iova, len }),
        }
    }

    fn set_interrupt(&self, mode: InterruptMode, event: Option<EventFd>) {
        let mut state = self.0.lock();
        state.event = event.map(|event| (mode, event));
        state.masked = false;
        state.signal_pin();
    }

    fn unmask_intx(&self) {
        let mut state = self.0.lock();
        state.masked = false;
        state.signal_pin();
    }

    fn reset(&self) {
        let mut state = self.0.lock();
        state.registers.clear();
        state.pin = false;
        state.event = None;
        state.resets += 1;
    }
}

/// A recording card, a server and a client.
struct Wired {
    card: Arc<Recording>,
    backend: Arc<PassthroughVm>,
    folder: TempDir,
    stop: StopHandle,
    thread: Option<JoinHandle<()>>,
}

impl Wired {
    fn new() -> Self {
        Self::with(Vec::new(), false)
    }

    /// Creates a card with these PROM contents. `flr` is true if the card supports function-level resets.
    fn with(rom: Vec<u8>, flr: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let card = Arc::new(Recording(Mutex::new(State { rom, ..State::default() })));
        let link = Link::new(IrqCounts { intx: 1, msi: 1, ..IrqCounts::default() }).unwrap();
        let stop = StopHandle::new().unwrap();
        let (mut device, backend) =
            PassthroughDevice::build(Arc::clone(&card) as Arc<dyn Card>, 256, flr, "p", &link).unwrap();
        let path = folder.path().join("s");
        let server = Server::bind(&path, &SocketOptions::default(), ServerOptions::default()).unwrap();
        let ends = stop.clone();
        let thread = std::thread::spawn(move || server.run(&link, &mut device, &ends).unwrap());
        Self { card, backend, folder, stop, thread: Some(thread) }
    }

    fn client(&self) -> Client {
        // The server may not have detected yet that the last client has disconnected.
        let client = (0..10_000)
            .find_map(|_| {
                let client = Client::connect(&self.folder.path().join("s")).ok();
                client.or_else(|| {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    None
                })
            })
            .expect("the server does not accept a client");
        client.set_timeout(Some(WAIT_TIMEOUT)).unwrap();
        client
    }

    fn register(&self, offset: u32) -> u32 {
        self.card.0.lock().registers.get(&offset).copied().unwrap_or(0)
    }
}

impl Drop for Wired {
    fn drop(&mut self) {
        self.stop.stop();
        let ended = self.thread.take().map_or(Ok(()), JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap();
            assert_eq!((self.card.mapped(), self.card.mode()), (vec![], None), "the card was not cleaned");
        }
    }
}

#[test]
fn accesses_of_all_sizes_become_registers() {
    let wired = Wired::new();
    let mut client = wired.client();
    client.write(BAR0, 0x10, &0x1122_3344u32.to_le_bytes()).unwrap();
    client.write(BAR0, 0x11, &[0xaa]).unwrap();
    assert_eq!(wired.register(0x10), 0x1122_aa44);
    client.write(BAR0, 0x12, &[0xcc, 0xbb]).unwrap();
    assert_eq!(wired.register(0x10), 0xbbcc_aa44);
    client.write(BAR0, 0x18, &0x0123_4567_89ab_cdefu64.to_le_bytes()).unwrap();
    assert_eq!((wired.register(0x18), wired.register(0x1c)), (0x89ab_cdef, 0x0123_4567));

    let mut byte = [0; 1];
    client.read(BAR0, 0x13, &mut byte).unwrap();
    assert_eq!(byte, [0xbb]);
    let mut half = [0; 2];
    client.read(BAR0, 0x10, &mut half).unwrap();
    assert_eq!(half, [0x44, 0xaa]);
    let mut long = [0; 8];
    client.read(BAR0, 0x18, &mut long).unwrap();
    assert_eq!(u64::from_le_bytes(long), 0x0123_4567_89ab_cdef);
}

#[test]
fn apertures_pass_offset_and_bytes() {
    let wired = Wired::new();
    let mut client = wired.client();
    client.write(BAR1, 0x1238, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    client.write(3, 0x40, &[9]).unwrap();
    let mut data = [0; 4];
    client.read(3, 0x44, &mut data).unwrap();
    assert_eq!(data, [0x44; 4]);
    let written = wired.card.0.lock().aperture.clone();
    assert_eq!(written, [(Aperture::Bar1, 0x1238, vec![1, 2, 3, 4, 5, 6, 7, 8]), (Aperture::Bar3, 0x40, vec![9])]);
}

#[test]
fn configuration_space_shows_the_card() {
    let wired = Wired::new();
    let mut client = wired.client();
    assert_eq!(client.read32(CONFIG, 0).unwrap(), 0x06d8_10de);
    assert_eq!(client.read32(CONFIG, 0x2c).unwrap(), 0x1234_10de);
    assert_eq!(wired.backend.status().pci_id, (0x10de, 0x06d8));
}

#[test]
fn card_reaches_guest_memory_only_while_bus_mastering_is_on() {
    let wired = Wired::new();
    let mut client = wired.client();
    let file = memory_file(0x4000, true).unwrap();
    client.dma_map(0x1000, 0x2000, true, Some((file.as_fd(), 0))).unwrap();
    assert_eq!(wired.card.mapped(), []);
    client.write(CONFIG, COMMAND, &[MASTER]).unwrap();
    assert_eq!(wired.card.mapped(), [(0x1000, 0x2000)]);
    client.dma_map(0x8000, 0x1000, true, Some((file.as_fd(), 0x2000))).unwrap();
    assert_eq!(wired.card.mapped(), [(0x1000, 0x2000), (0x8000, 0x1000)]);
    client.dma_unmap(0x1000, 0x2000).unwrap();
    assert_eq!(wired.card.mapped(), [(0x8000, 0x1000)]);
    assert!(wired.backend.status().bus_master);
    client.write(CONFIG, COMMAND, &[0]).unwrap();
    assert_eq!(wired.card.mapped(), []);
    client.dma_unmap(0x8000, 0x1000).unwrap();
}

#[test]
fn memory_beyond_the_card_s_reach_is_counted_and_the_rest_works() {
    let wired = Wired::new();
    let mut client = wired.client();
    let file = memory_file(0x2000, true).unwrap();
    client.write(CONFIG, COMMAND, &[MASTER]).unwrap();
    client.dma_map(ADDRESS_LIMIT, 0x1000, true, Some((file.as_fd(), 0))).unwrap();
    client.dma_map(0x1000, 0x1000, true, Some((file.as_fd(), 0x1000))).unwrap();
    client.dma_map(0x9000, 0x1000, false, None).unwrap();
    assert_eq!(wired.card.mapped(), [(0x1000, 0x1000)]);
    assert_eq!(wired.backend.status().counters["dma_regions_out_of_reach"], 1);
    client.dma_unmap(ADDRESS_LIMIT, 0x1000).unwrap();
    client.dma_unmap(0x9000, 0x1000).unwrap();
}

#[test]
fn msi_edges_reach_the_client() {
    let wired = Wired::new();
    let mut client = wired.client();
    let fds = client.attach_irqs(MSI, 1).unwrap();
    client.write(CONFIG, MSI_CONTROL, &[1]).unwrap();
    assert_eq!(wired.backend.status().interrupts, InterruptKind::Msi);
    for _ in 0..3 {
        wired.card.message();
        assert_eq!(wait_event(&fds[0], WAIT_TIMEOUT).unwrap(), 1);
    }
    client.write(CONFIG, MSI_CONTROL, &[0]).unwrap();
    assert_eq!(wired.card.mode(), Some(InterruptMode::Intx));
}

#[test]
fn pin_interrupt_repeats_after_unmask_only_while_asserted() {
    let wired = Wired::new();
    let mut client = wired.client();
    let fds = client.attach_irqs(INTX, 1).unwrap();
    assert_eq!(wired.card.mode(), Some(InterruptMode::Intx));
    wired.card.set_pin(true);
    wait_event(&fds[0], WAIT_TIMEOUT).unwrap();

    // The handler accesses the card without deasserting the pin, so the interrupt must be delivered again.
    client.read32(BAR0, 0x200).unwrap();
    client.unmask_intx().unwrap();
    wait_event(&fds[0], WAIT_TIMEOUT).unwrap();

    // Now the handler deasserts the pin, so no interrupt arrives.
    client.read32(BAR0, ACKNOWLEDGE.into()).unwrap();
    client.unmask_intx().unwrap();
    client.read32(BAR0, 0x200).unwrap();
    assert!(wait_event(&fds[0], Duration::ZERO).is_err());

    wired.card.set_pin(true);
    wait_event(&fds[0], WAIT_TIMEOUT).unwrap();
    client.read32(BAR0, ACKNOWLEDGE.into()).unwrap();
}

#[test]
fn driver_that_turns_the_pin_off_gets_nothing() {
    let wired = Wired::new();
    let mut client = wired.client();
    client.write(CONFIG, COMMAND, &NO_INTX.to_le_bytes()).unwrap();
    assert_eq!(wired.card.mode(), None);
    assert_eq!(wired.backend.status().interrupts, InterruptKind::Off);
}

#[test]
fn reset_and_disconnect_leave_a_clean_card() {
    let wired = Wired::new();
    let mut client = wired.client();
    let file = memory_file(0x1000, true).unwrap();
    client.dma_map(0, 0x1000, true, Some((file.as_fd(), 0))).unwrap();
    client.write(CONFIG, COMMAND, &[MASTER]).unwrap();
    client.write32(BAR0, 0x10, 5).unwrap();
    let before = wired.card.0.lock().resets;

    client.reset().unwrap();
    assert_eq!(wired.card.0.lock().resets, before + 1);
    assert_eq!((wired.register(0x10), wired.card.mapped()), (0, vec![]));
    // The client still lends its memory, so the guest's next driver can enable bus mastering and use it.
    client.write(CONFIG, COMMAND, &[MASTER]).unwrap();
    assert_eq!(wired.card.mapped(), [(0, 0x1000)]);
    client.write32(BAR0, 0x10, 7).unwrap();

    drop(client);
    let mut client = wired.client();
    assert_eq!(client.read32(BAR0, 0x10).unwrap(), 0);
    assert_eq!(wired.card.mapped(), []);
    assert_eq!(client.read32(CONFIG, 4).unwrap() & 0xffff, 0);
}

#[test]
fn expansion_rom_matches_prom_and_is_read_only() {
    // The image has 1 KiB, but a BAR has at least 2 KiB.
    let mut image: Vec<u8> = (0..1024_u32).map(|at| (at * 7) as u8).collect();
    image[..3].copy_from_slice(&[0x55, 0xaa, 2]);
    let wired = Wired::with(image.clone(), false);
    let mut client = wired.client();
    client.write(CONFIG, ROM_BAR, &[0xff; 4]).unwrap();
    assert_eq!(client.read32(CONFIG, ROM_BAR).unwrap(), 0xffff_f801);
    assert_eq!(client.region(ROM).unwrap().info.size, 2048);
    let mut read = vec![0; 2048];
    client.read(ROM, 0, &mut read).unwrap();
    assert_eq!((&read[..1024], &read[1024..]), (&image[..], &[0xff; 1024][..]));
    assert!(client.write(ROM, 0, &[0]).is_err() && client.read(ROM, 2048, &mut [0; 4]).is_err());

    let without = Wired::new();
    let mut client = without.client();
    client.write(CONFIG, ROM_BAR, &[0xff; 4]).unwrap();
    assert_eq!((client.read32(CONFIG, ROM_BAR).unwrap(), client.region(ROM).unwrap().info.size), (0, 0));
}

#[test]
fn function_is_reset_by_itself_only_where_it_can_be() {
    for flr in [false, true] {
        let wired = Wired::with(Vec::new(), flr);
        let mut client = wired.client();
        let file = memory_file(0x1000, true).unwrap();
        client.dma_map(0, 0x1000, true, Some((file.as_fd(), 0))).unwrap();
        client.write(CONFIG, COMMAND, &[MASTER]).unwrap();
        client.write32(BAR0, 0x10, 5).unwrap();
        let before = wired.card.0.lock().resets;
        client.write(CONFIG, DEVICE_CONTROL, &INITIATE_RESET.to_le_bytes()).unwrap();
        assert_eq!(wired.card.0.lock().resets - before, u32::from(flr));
        assert_eq!((wired.register(0x10), wired.card.mapped().len()), if flr { (0, 0) } else { (5, 1) });
        // A driver restores the saved configuration space and continues.
        client.write(CONFIG, COMMAND, &[MASTER]).unwrap();
        assert_eq!(wired.card.mapped(), [(0, 0x1000)]);
    }
}

#[test]
fn function_that_sleeps_answers_nothing() {
    let wired = Wired::new();
    let mut client = wired.client();
    client.write32(BAR0, 0x10, 5).unwrap();
    client.write(CONFIG, POWER_CONTROL, &[3, 0]).unwrap();
    client.write32(BAR0, 0x10, 6).unwrap();
    client.write(BAR1, 0, &[1]).unwrap();
    assert_eq!((client.read32(BAR0, 0x10).unwrap(), client.read32(BAR1, 0).unwrap()), (u32::MAX, u32::MAX));
    client.write(CONFIG, POWER_CONTROL, &[0, 0]).unwrap();
    assert_eq!(client.read32(BAR0, 0x10).unwrap(), 5);
    assert!(wired.card.0.lock().aperture.is_empty());
}
