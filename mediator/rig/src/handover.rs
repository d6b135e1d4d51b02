//! Hands a card and its VMs over to another owner, as one process does to another. The handover consists of a file,
//! descriptors of card and host memory, and the links to the VMs' clients.

use super::{Guest, Rig, WAIT_TIMEOUT};
use card::Card;
use card_manager::{Handed, ManagedCard, ManagerError, Reopened, SavedHost, Sharing, Standstill};
use firmware::Set;
use handover::{Introduction, Package, Receiver, Sender};
use nvspec::regs::pbus;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use saved_state::{Known, SavedState, Writer};
use simgpu::Vram;
use simgpu::{Config, NotQuiescent, SavedCard, SimGpu};
use std::error::Error;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vgpu::{MediatedDevice, MediatedVm, SavedSide};
use vram::TenantId;

/// Owner number of the card's parts.
const CARD: u32 = 0;
/// Interval between attempts to quiesce the card's parts.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Name of the card memory's descriptor.
const VRAM: &str = "vram";
const HOST_MEMORY: &str = "host-memory";
const APERTURES: &str = "apertures-";

/// Settings of a card that can be handed over.
#[derive(Clone, Debug)]
pub struct Handover {
    /// Settings of the card, whose memory is [shared](Config::shared).
    pub config: Config,
    /// Settings of the card manager, whose host memory is [shared](Sharing::shared).
    pub sharing: Sharing,
}

/// The card and VMs in the next owner, before the takeover.
struct Next {
    card: Arc<SimGpu>,
    reopened: Reopened,
    vms: Vec<(MediatedDevice, Arc<MediatedVm>)>,
}

type Refusal = Box<dyn Error>;

impl Handover {
    /// Returns the parts that the next owner supports.
    fn reads(&self) -> Vec<Known> {
        let mut known = SavedHost::known();
        known.extend(SavedSide::known());
        known.push(Known::for_part::<SavedCard>());
        known
    }

    /// Creates a card that can be handed over.
    #[must_use]
    pub fn rig(&self) -> Rig {
        Rig::made(&self.config, &self.sharing, |card| card)
    }

    /// Hands over the rig's card, with all of its `guests`, to another owner. The guests notice only the elapsed time.
    ///
    /// # Panics
    /// Panics if a part cannot be handed over, or if the previous owner accesses the card after the takeover.
    pub fn hand_over(&self, rig: &mut Rig, guests: &mut [&mut Guest]) {
        guests.sort_by_key(|guest| guest.backend.id());
        let (Next { card, reopened, vms }, receiver) = {
            let still = rig.host.stand_still(WAIT_TIMEOUT).expect("a quiescent card");
            let written = written(rig, &still, guests, self.reads());
            let (sender, receiver, next) = self.offered(rig, guests, written).expect("the saved state is accepted");
            sender.await_ready(WAIT_TIMEOUT).expect("the receiver is ready");
            still.give_away();
            sender.let_go().expect("a connected receiver");
            (next, receiver)
        };
        receiver.wait(WAIT_TIMEOUT).expect("the sender releases the card");
        card.go_on();
        rig.host = reopened.take_over("next").expect("the card is taken over");
        let before = std::mem::replace(&mut rig.card, card);
        let apertures = before.read32(pbus::BAR1_BLOCK::OFFSET);
        for (guest, (device, backend)) in guests.iter_mut().zip(vms) {
            (guest.device, guest.backend) = (device, backend);
            guest.backend.go_on();
        }
        // The previous owner has been dropped. On hardware, both owners would use the same card.
        assert_eq!(before.read32(pbus::BAR1_BLOCK::OFFSET), apertures, "the previous owner does not access the card");
        assert!(pbus::BAR1_BLOCK::VALID.is_set(apertures));
    }

    /// Offers the card to another owner, and drops that owner before the takeover. The rig then continues. `edit`
    /// modifies the file in transit.
    ///
    /// # Errors
    /// Returns an error if the other owner rejects the card.
    pub fn offer(&self, rig: &Rig, guests: &mut [&mut Guest], edit: impl FnOnce(&mut Vec<u8>)) -> Result<(), Refusal> {
        guests.sort_by_key(|guest| guest.backend.id());
        let still = rig.host.stand_still(WAIT_TIMEOUT)?;
        let mut written = written(rig, &still, guests, self.reads());
        edit(&mut written.file);
        let offered = self.offered(rig, guests, written).map(drop);
        rig.card.go_on();
        drop(still);
        offered
    }

    /// Sends the saved state to another owner, which opens it as another process would. The rig still owns the card.
    fn offered(&self, rig: &Rig, guests: &[&mut Guest], written: Package) -> Result<(Sender, Receiver, Next), Refusal> {
        let (sender, receiver) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let receiver = Receiver::connect(receiver, &Introduction { program: "the next".into(), reads: self.reads() })?;
        let (sender, _) = Sender::meet(sender, WAIT_TIMEOUT)?;
        let Package { file, mut descriptors } = written;
        descriptors.push((VRAM.to_owned(), rig.card.vram_file().ok_or("private VRAM")?.try_clone()?.into()));
        if let Some(file) = rig.host.host_memory() {
            descriptors.push((HOST_MEMORY.to_owned(), file.try_clone()?.into()));
        }
        sender.give(&Package { file, descriptors })?;
        let next = self.open(guests, receiver.take(WAIT_TIMEOUT)?)?;
        receiver.ready()?;
        Ok((sender, receiver, next))
    }

    /// Opens the received state.
    fn open(&self, guests: &[&mut Guest], mut package: Package) -> Result<Next, Refusal> {
        let vram = package.take(VRAM).pop().ok_or("no VRAM")?;
        let host_memory = package.take(HOST_MEMORY).pop().map(File::from);
        let bytes = std::mem::take(&mut package.file);
        let mut file = SavedState::parse(&bytes, &self.reads())?;
        let saved = SavedHost::read(&mut file)?;
        let vram = Vram::of_file(vram.into(), u64::from(self.config.vram_mib) << 20)?;
        let card = Arc::new(SimGpu::restored(&self.config, file.take(CARD)?, vram)?);
        let settings = |vm: TenantId| guests.iter().find(|guest| guest.backend.id() == vm).map(|guest| &guest.settings);
        let mut reopened = ManagedCard::reopen(
            Arc::clone(&card) as Arc<dyn Card>,
            &self.sharing,
            Set::stand_in(),
            Handed { saved, host_memory },
            &|vm, info, card| Some(settings(vm)?.surroundings(info, card)),
        )?;
        let mut vms = Vec::new();
        for guest in guests {
            let (vm, settings) = (guest.backend.id(), &guest.settings);
            let apertures = package.take(&format!("{APERTURES}{vm}"));
            let side = SavedSide::read(vm, &mut file, apertures)?;
            vms.push(MediatedVm::reopen(&mut reopened, vm, side, settings, &guest.link)?);
        }
        file.finish()?;
        Ok(Next { card, reopened, vms })
    }
}

/// Saves the card and its VMs, including the files behind mapped apertures. The card must be quiescent.
fn written(rig: &Rig, still: &Standstill<'_>, guests: &[&mut Guest], reads: Vec<Known>) -> Package {
    let began = Instant::now();
    let (host, sides) = loop {
        let mut sides = Vec::new();
        let mut save = |guest: &&mut Guest| {
            let (saved, side) = guest.backend.save()?;
            sides.push((saved.vm, side));
            Ok(saved)
        };
        match still.save(|| guests.iter().map(&mut save).collect()) {
            Ok(saved) => break (saved, sides),
            Err(ManagerError::Unsettled(_)) if began.elapsed() < WAIT_TIMEOUT => std::thread::sleep(RETRY_INTERVAL),
            Err(error) => panic!("cannot save the card: {error}"),
        }
    };
    while let Err(unrest) = rig.card.halt() {
        assert!(matches!(unrest, NotQuiescent::Working(_)) && began.elapsed() < WAIT_TIMEOUT, "{unrest}");
        std::thread::sleep(RETRY_INTERVAL);
    }
    let mut file = Writer::for_reader([7; 16], reads);
    host.write(&mut file).expect("the host's state is saved");
    file.put(CARD, &rig.card.save().expect("the card is quiescent")).expect("the card's state is saved");
    let mut descriptors = Vec::new();
    for (vm, mut side) in sides {
        side.write(vm, &mut file).expect("the VM's state is saved");
        descriptors.extend(side.take_files().into_iter().map(|fd| (format!("{APERTURES}{vm}"), fd)));
    }
    Package { file: file.finish(), descriptors }
}
