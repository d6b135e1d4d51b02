//! Handover of cards with an owner process. The owner and the workers of guest programs are separate processes, which
//! keep running. The next daemon receives their pipes and links.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::Instant;

use events::Log;
use fdstore::names::OF_VM;
use saved_state::{Known, SavedState, Writer};
use vcuda::SuspendedFunction;
use vmm_glue::{Link, StopHandle};

use super::receiver::{Coming, Successor};
use super::{CLIENTS, FUNCTION, OWNER, SOCKET, known};
use crate::Endpoint;
use crate::cuda::{CudaCard, GivenOwner, function};
use crate::vm::{Rest, Running};
use config::Config;
use handover::{RosterCudaCard, RosterVm};
use listening::Sockets;

/// Identity of the handover file. It can be constant, because the file is passed directly to one other process and
/// never stored.
const IDENTITY: [u8; 16] = *b"mediatord cuda  ";

/// A card that is handed over with its virtual machines.
pub(super) struct GoingCuda {
    pub name: String,
    pub card: Arc<CudaCard>,
    pub vms: Vec<(String, Arc<Running>)>,
}

/// A suspended card. On drop, its functions resume, and the daemon uses the owner again.
pub(super) struct SuspendedCuda {
    functions: Vec<SuspendedFunction>,
    outcome: Sender<bool>,
}

impl SuspendedCuda {
    /// Leaves the owner and the workers to the other daemon.
    pub(super) fn leave(self) {
        self.functions.into_iter().for_each(SuspendedFunction::leave);
        // The thread that supervises the owner waits for this message.
        let _ended = self.outcome.send(true);
    }
}

/// A suspended card, its entry in the roster, and its descriptors by name.
type GoneCuda = (SuspendedCuda, RosterCudaCard, Vec<(String, OwnedFd)>);

/// Suspends a card whose virtual machines are already suspended, and serializes it.
pub(super) fn suspend(
    going: &GoingCuda,
    until: Instant,
    resting: &[(String, Arc<Running>, Rest)],
    reads: &[Known],
) -> Result<GoneCuda, String> {
    let of_card = |why: &dyn std::fmt::Display| format!("card `{}`: {why}", going.name);
    let (owner, outcome) = going.card.hand_over(until).map_err(|why| of_card(&why))?;
    let GivenOwner { model, uuid, owner, descriptors } = owner;
    let mut all: Vec<_> = descriptors.into_iter().map(|fd| (format!("{OWNER}{}", going.name), fd)).collect();
    let mut suspended = SuspendedCuda { functions: Vec::new(), outcome };
    let mut file = Writer::for_reader(IDENTITY, reads.to_vec());
    let mut vms = Vec::new();
    let of_it = resting.iter().filter(|(vm, ..)| going.vms.iter().any(|(of, _)| of == vm));
    for ((vm, running, rest), id) in of_it.zip(0u32..) {
        let of_vm = |why: &dyn std::fmt::Display| format!("VM `{vm}`: {why}");
        let function = running.backend.cuda().ok_or_else(|| of_vm(&"its device cannot be handed over"))?;
        let function = function.function.suspend(until).map_err(|why| of_vm(&why))?;
        let (saved, descriptors) = function.save().map_err(|why| of_vm(&why))?;
        suspended.functions.push(function);
        file.put(id, &saved).map_err(|error| of_vm(&error))?;
        all.extend(descriptors.into_iter().map(|fd| (format!("{FUNCTION}{vm}"), fd)));
        // Save the client last, because the function raises interrupts until it is suspended.
        let (saved, descriptors) = rest.parked.save(&running.link).map_err(|error| of_vm(&error))?;
        file.put(id, &saved).map_err(|error| of_vm(&error))?;
        all.extend(descriptors.into_iter().map(|fd| (format!("{CLIENTS}{vm}"), fd)));
        // Sockets from the service manager are handed over separately.
        if running.socket.is_some() {
            let listener = rest.listener().map_err(|error| of_vm(&error))?;
            all.push((format!("{SOCKET}{OF_VM}{vm}"), listener));
        }
        vms.push(RosterVm {
            name: vm.clone(),
            id,
            vram_bytes: 0,
            memory_not_shared: running.seen.memory_not_shared.load(Ordering::Relaxed),
            resets: running.seen.resets.load(Ordering::Relaxed),
        });
    }
    let card = RosterCudaCard { name: going.name.clone(), model, uuid, owner, file: file.finish(), vms };
    Ok((suspended, card, all))
}

/// Rebuilds a card and its virtual machines from the received state, without using the owner or a worker.
pub(super) fn restored(
    config: &Config,
    sockets: &Sockets,
    events: &Arc<Log>,
    successor: &mut Successor,
    saved: RosterCudaCard,
) -> Result<(Arc<CudaCard>, Vec<Coming>), String> {
    let RosterCudaCard { name, model, uuid, owner, file, vms } = saved;
    let of_card = |why: &dyn std::fmt::Display| format!("card `{name}`: {why}");
    let spec = config.cards.iter().find(|card| card.name == name);
    let spec = spec.ok_or_else(|| {
        of_card(&"the configuration no longer contains it; restore it, or remove its VMs and tenants first")
    })?;
    let descriptors = successor.descriptors.take(&format!("{OWNER}{name}"));
    let given = GivenOwner { model, uuid, owner, descriptors };
    let tenants = config.tenants.iter().filter(|tenant| tenant.uses(&name)).map(|tenant| tenant.name.as_str());
    let functions = config.vms.iter().filter(|vm| vm.card == name && vm.cuda.is_some()).map(|vm| vm.name.as_str());
    let names: Vec<&str> = tenants.chain(functions).collect();
    let dir = &config.daemon.socket_dir;
    let card = CudaCard::adopted(spec, config, events, given, &names).map_err(|why| of_card(&why))?;
    let card = Arc::new(card);
    let mut file = SavedState::parse(&file, &known()).map_err(|error| of_card(&error))?;
    let mut coming = Vec::new();
    for saved in vms {
        let of_vm = |why: &dyn std::fmt::Display| format!("VM `{}`: {why}", saved.name);
        let vm = config.vms.iter().find(|vm| vm.name == saved.name && vm.card == name && vm.cuda.is_some());
        let vm =
            vm.ok_or_else(|| of_vm(&"the configuration has changed it; restore it, or remove the VM first"))?.clone();
        let endpoint = Endpoint::open(&vm, dir, sockets).map_err(|error| of_vm(&error))?;
        let ram = vm.memory.ram.on(&spec.memory);
        let limits = crate::memory_limits(&vm, &ram);
        let (server, path) = endpoint.serve(&vm.name, limits, sockets).map_err(|error| of_vm(&error))?;
        let link = Link::new(vcuda::irqs()).map_err(|error| of_vm(&error))?;
        let stop = StopHandle::new().map_err(|error| of_vm(&error))?;
        link.memory().first_touches().set_limit(crate::memory::touch_limit(&ram));
        let clients = file.take(saved.id).map_err(|error| of_vm(&error))?;
        let descriptors = successor.descriptors.take(&format!("{CLIENTS}{}", vm.name));
        let parked = server.parked(clients, descriptors, &link).map_err(|error| of_vm(&error))?;
        let function = file.take(saved.id).map_err(|error| of_vm(&error))?;
        let descriptors = successor.descriptors.take(&format!("{FUNCTION}{}", vm.name));
        let built = function::restored(&card, &vm, &link, dir, function, descriptors);
        let built = built.map_err(|error| of_vm(&error))?;
        coming.push(Coming { spec: vm, saved, server, path, link, stop, built, parked });
    }
    file.finish().map_err(|error| of_card(&error))?;
    Ok((card, coming))
}
