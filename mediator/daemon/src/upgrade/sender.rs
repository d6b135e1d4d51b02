//! Sending daemon of an upgrade.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use api::EventKind;
use card_manager::{ManagedCard, ManagerError, SavedHost, Standstill};
use events::NewEvent;
use fdstore::names::OF_VM;
use handover::{Introduction, Package, Sender};
use physical::{HaltedCard, WrittenCard};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use saved_state::{Known, Part, Writer};
use vgpu::SavedSide;
use vmm_glue::SavedClients;
use vram::TenantId;

use super::EventsPart;
use super::cuda::{self, GoingCuda, SuspendedCuda};
use super::{
    APERTURES, CLIENTS, HOST_MEMORY, MEET_LIMIT, PAUSE_LIMIT, SOCKET, STATE_LOCK, STILL_LIMIT, UNIT, VRAM,
    monotonic_ns, written_for,
};
use crate::backend::Movable;
use crate::vm::{Rest, Running};
use crate::{Daemon, DaemonError, Life};
use handover::{CudaPart, Roster, RosterCard, RosterCudaCard, RosterVm};

/// Interval between attempts to quiesce.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);
/// Identity of the handover file. It can be constant, because the file is passed directly to one other process and
/// never stored.
const IDENTITY: [u8; 16] = *b"mediatord upgrad";
/// Owner number of the roster.
const ROSTER: u32 = 0;

/// A card that is being handed over, with its virtual machines.
struct Going {
    name: String,
    movable: Movable,
    vms: Vec<(String, Arc<Running>)>,
}

/// All cards that are being handed over.
struct Leaving {
    mediated: Vec<Going>,
    /// Cards with an owner process.
    with_owner: Vec<GoingCuda>,
}

impl Leaving {
    /// Returns the virtual machines of all cards.
    fn vms(&self) -> impl Iterator<Item = &(String, Arc<Running>)> {
        let of_owners = self.with_owner.iter().flat_map(|card| &card.vms);
        self.mediated.iter().flat_map(|card| &card.vms).chain(of_owners)
    }
}

/// Serialized client of a virtual machine.
struct Client {
    vm: RosterVm,
    saved: SavedClients,
    descriptors: Vec<(String, OwnedFd)>,
}

/// A quiescent card with its serialized state.
struct Settled {
    host: SavedHost,
    sides: Vec<(TenantId, SavedSide)>,
    card: WrittenCard,
}

/// A card's serialized state, as sent to the next daemon.
struct Written {
    file: Vec<u8>,
    vms: Vec<RosterVm>,
    descriptors: Vec<(String, OwnedFd)>,
}

/// The next daemon's process, which is killed on drop unless it has taken over.
struct Next {
    child: Child,
    keeps: bool,
}

impl Drop for Next {
    fn drop(&mut self) {
        if !self.keeps {
            // The process may have exited already.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Daemon {
    /// Starts the program at this daemon's path as the next daemon, hands over all state, and returns the new process
    /// ID. This daemon exits after it has responded to the request.
    ///
    /// # Errors
    /// Returns an error, and resumes all VMs here, if the state cannot be handed over or is not taken over.
    pub fn hand_over(&self) -> Result<u32, DaemonError> {
        self.hand_over_now().inspect_err(|error| {
            self.line.has_failed();
            self.events.thaw();
            self.events.add(NewEvent::daemon(EventKind::UpgradeFailed, error.to_string()));
        })
    }

    fn hand_over_now(&self) -> Result<u32, DaemonError> {
        let _one_at_a_time = self.changing.lock();
        let _settings = self.tuning.lock();
        let succession = self.line.succession.get().ok_or_else(|| no("this daemon was not started as a program"))?;
        if self.state.lock().closing {
            return Err(DaemonError::ShuttingDown);
        }
        if let Some(tenant) = self.state.lock().changing_tenants.first() {
            return Err(no(format!("the cards of tenant `{tenant}` are being changed")));
        }
        let leaving = self.going()?;
        let program = &succession.program;
        handover::points::here("sender: asked");
        let (sender, introduction, mut next) = start(program, &succession.config)?;
        let pid = next.child.id();
        tracing::info!(program = %program.display(), pid, version = introduction.program, "the next daemon has connected");
        handover::points::here("sender: met");
        let what = format!("mediatord {} takes over, process {pid}", introduction.program);
        self.events.add(NewEvent::daemon(EventKind::UpgradeBegan, what));
        let began_ns = monotonic_ns();
        let mut resting = Vec::new();
        let reads = written_for(introduction.reads);
        let given = self.give(sender, pid, &reads, &leaving, began_ns, &mut resting);
        if let Err(why) = given {
            tracing::error!(why, "the next daemon does not take over; this daemon continues");
            go_on(&leaving, resting);
            return Err(no(why));
        }
        next.keeps = true;
        self.forget_all(resting);
        let paused_ms = monotonic_ns().saturating_sub(began_ns) / 1_000_000;
        tracing::info!(pid, paused_ms, "the next daemon continues with all cards and VMs");
        self.line.leave();
        Ok(pid)
    }

    /// Drops all virtual machines and sockets without affecting clients or cards.
    fn forget_all(&self, resting: Vec<(String, Arc<Running>, Rest)>) {
        self.sockets.leave();
        let vms = {
            let mut state = self.state.lock();
            state.closing = true;
            std::mem::take(&mut state.vms)
        };
        // Dropping them sends no messages to clients, and frees no card resources.
        drop(resting);
        drop(vms);
    }

    /// Returns the cards and virtual machines to hand over, or an error if one of them cannot be handed over.
    fn going(&self) -> Result<Leaving, DaemonError> {
        // Copy the table, so that other threads do not wait for cards and VMs.
        let table: Vec<_> = {
            let state = self.state.lock();
            if let Some(tenant) = state.coming.iter().chain(&state.changing_tenants).next() {
                return Err(no(format!("tenant `{tenant}` is being added or changed")));
            }
            state.vms.values().map(|entry| (entry.spec.clone(), entry.life.clone())).collect()
        };
        let (mut going, mut with_owner) = (Vec::new(), Vec::new());
        for (name, card) in &self.cards {
            let of_card = |why: &dyn std::fmt::Display| no(format!("card `{name}`: {why}"));
            let mut vms = Vec::new();
            for (spec, life) in table.iter().filter(|(spec, _)| spec.card == *name) {
                let vm = &spec.name;
                let of_vm = |why: &dyn std::fmt::Display| no(format!("VM `{vm}`: {why}"));
                if spec.passthrough || spec.xen_domain.is_some() {
                    return Err(of_vm(&"a card in passthrough or a Xen domain cannot be handed over"));
                }
                let Life::Running(running) = life else { return Err(of_vm(&"it is being created or removed")) };
                if let Some(why) = &*running.seen.failed.lock() {
                    return Err(of_vm(&format!("it is out of service, remove it: {why}")));
                }
                if running.backend.cuda().is_some() {
                    vms.push((vm.clone(), Arc::clone(running)));
                    continue;
                }
                let mediated = running.backend.mediated().ok_or_else(|| of_vm(&"its device cannot be handed over"))?;
                mediated.check_movable().map_err(|error| of_vm(&error))?;
                vms.push((vm.clone(), Arc::clone(running)));
            }
            if let Some(card) = &card.cuda {
                with_owner.push(GoingCuda { name: name.clone(), card: Arc::clone(card), vms });
                continue;
            }
            match card.backend.movable().map_err(|error| of_card(&error))? {
                Some(movable) => {
                    movable.host.check_movable().map_err(|error| of_card(&error))?;
                    going.push(Going { name: name.clone(), movable, vms });
                }
                // The card was never used, so the next daemon opens it normally.
                None if vms.is_empty() => {}
                None => return Err(of_card(&"it has failed")),
            }
        }
        Ok(Leaving { mediated: going, with_owner })
    }

    /// Hands over all state, but not yet its ownership. Adds suspended virtual machines to `resting`.
    fn give(
        &self,
        sender: Sender,
        pid: u32,
        reads: &[Known],
        leaving: &Leaving,
        began_ns: u64,
        resting: &mut Vec<(String, Arc<Running>, Rest)>,
    ) -> Result<(), String> {
        let until = Instant::now() + PAUSE_LIMIT;
        let Leaving { mediated: going, with_owner } = leaving;
        let vms = || leaving.vms();
        // Request the suspension of all virtual machines before waiting for any of them.
        vms().for_each(|(_, running)| running.park());
        for (name, running) in vms() {
            let rest = running.rested(Some(until)).map_err(|why| format!("VM `{name}`: {why}"))?;
            resting.push((name.clone(), Arc::clone(running), rest));
        }
        handover::points::here("sender: clients rest");
        let resting = &*resting;
        // If the upgrade fails, dropping `suspended` resumes the VMs' CUDA functions.
        let (mut suspended, mut cuda_cards, mut cuda_descriptors) = (Vec::new(), Vec::new(), Vec::new());
        for card in with_owner {
            let (one, card, descriptors) = cuda::suspend(card, until, resting, reads)?;
            suspended.push(one);
            cuda_cards.push(card);
            cuda_descriptors.extend(descriptors);
        }
        thread::scope(|scope| {
            let mut cards = Vec::new();
            for card in going {
                let (settled, settles) = mpsc::channel();
                let (verdict, told) = mpsc::channel();
                let thread = scope.spawn(move || rest(card, until, &settled, &told));
                cards.push((card, settles, verdict, thread));
            }
            let mut parts = Vec::new();
            let mut failed = None;
            for (card, settles, ..) in &cards {
                let of_card = |why: String| format!("card `{}`: {why}", card.name);
                let settled = settles.recv().unwrap_or_else(|_| Err("the card's thread has panicked".to_owned()));
                // Save clients last, because work that completes while the card quiesces raises interrupts for them.
                let written = settled.map_err(of_card).and_then(|settled| write(card, settled, resting, reads));
                match written {
                    Ok(written) => parts.push((*card, written)),
                    Err(why) => failed = failed.or(Some(why)),
                }
            }
            handover::points::here("sender: written");
            let done = match failed {
                Some(why) => Err(why),
                None => self.package(began_ns, parts, (cuda_cards, cuda_descriptors), reads).and_then(|package| {
                    sender.give(&package).map_err(|error| error.to_string())?;
                    handover::points::here("sender: given");
                    let left = until.saturating_duration_since(Instant::now());
                    sender.await_ready(left).map_err(|error| error.to_string())
                }),
            };
            handover::points::here("sender: the other is ready");
            let goes = done.is_ok();
            if goes {
                self.line.lets_go();
            }
            for (.., verdict, thread) in cards {
                let _gone = verdict.send(goes);
                joined(thread);
            }
            done
        })?;
        suspended.into_iter().for_each(SuspendedCuda::leave);
        // The service manager must receive this message before messages from the next daemon, such as sockets to store.
        if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::MainPid(pid)]) {
            tracing::warn!(%error, "cannot notify the service manager of the new main process");
        }
        handover::points::here("sender: the service manager is told");
        // From here on, this process no longer owns the state, even if the next daemon fails.
        if let Err(error) = sender.let_go() {
            tracing::error!(%error, "the next daemon exited during the takeover: its VMs have lost their devices");
        }
        handover::points::here("sender: let go");
        Ok(())
    }

    /// Returns the package of all state to hand over.
    fn package(
        &self,
        began_ns: u64,
        parts: Vec<(&Going, Written)>,
        (cuda_cards, mut descriptors): (Vec<RosterCudaCard>, Vec<(String, OwnedFd)>),
        reads: &[Known],
    ) -> Result<Package, String> {
        let mut cards = Vec::new();
        for (going, Written { file, vms, descriptors: more }) in parts {
            cards.push(RosterCard { name: going.name.clone(), next_vm: going.movable.next_vm, file, vms });
            descriptors.extend(more);
        }
        let copied = |name: String, listener: &dyn AsFd| -> Result<_, String> {
            let fd = listener.as_fd().try_clone_to_owned().map_err(|error| format!("socket `{name}`: {error}"))?;
            Ok((name, fd))
        };
        for (name, listener) in self.line.succession.get().map(|it| it.admin.as_slice()).unwrap_or_default() {
            descriptors.push(copied(format!("{SOCKET}{name}"), listener)?);
        }
        for (name, listener) in self.sockets.of_units() {
            descriptors.push(copied(format!("{UNIT}{name}"), listener)?);
        }
        let override_store = self.override_store.lock();
        if let Some(lock) = override_store.lock() {
            descriptors.push(copied(STATE_LOCK.to_owned(), lock)?);
        }
        let state = override_store.state(&self.live_now()).map_err(|error| error.to_string())?;
        let upgrades = self.line.last().map_or(0, |last| last.upgrades);
        let mut file = Writer::for_reader(IDENTITY, reads.to_vec());
        file.put(ROSTER, &Roster { began_ns, upgrades, state, cards }).map_err(|error| error.to_string())?;
        if !cuda_cards.is_empty() {
            file.put(ROSTER, &CudaPart(cuda_cards)).map_err(|error| error.to_string())?;
        }
        if reads.iter().any(|known| known.name == EventsPart::NAME) {
            file.put(ROSTER, &EventsPart(self.events.freeze())).map_err(|error| error.to_string())?;
        }
        Ok(Package { file: file.finish(), descriptors })
    }
}

fn joined(thread: ScopedJoinHandle<'_, ()>) {
    if thread.join().is_err() {
        tracing::error!("a thread that pauses a card has panicked");
    }
}

/// Starts the next program, and waits until it introduces itself.
fn start(program: &Path, config: &Path) -> Result<(Sender, Introduction, Next), DaemonError> {
    let failed = |what: &dyn std::fmt::Display| no(format!("{}: {what}", program.display()));
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (ours, theirs) = pair.map_err(|error| failed(&error))?;
    let child = Command::new(program)
        .arg("--takeover")
        .arg("--config")
        .arg(config)
        .stdin(Stdio::from(theirs))
        // These variables apply only to this process.
        .env_remove("WATCHDOG_PID")
        .env_remove("LISTEN_PID")
        .env_remove("LISTEN_FDS")
        .env_remove("LISTEN_FDNAMES")
        .spawn()
        .map_err(|error| failed(&error))?;
    let next = Next { child, keeps: false };
    let (sender, introduction) = Sender::meet(ours, MEET_LIMIT).map_err(|error| failed(&error))?;
    Ok((sender, introduction, next))
}

/// Resumes all virtual machines whose suspension was requested.
fn go_on(leaving: &Leaving, resting: Vec<(String, Arc<Running>, Rest)>) {
    let goes_on = |name: &str, running: &Running, rest: Rest| {
        if let Err(error) = running.go_on(name, rest) {
            tracing::error!(vm = name, %error, "the VM is out of service; remove it and add it again");
        }
    };
    let late = leaving.vms().filter(|(name, _)| resting.iter().all(|(of, ..)| of != name));
    for (name, running) in late {
        // A thread that is not suspended yet may be suspended later, and must then resume.
        running.go_on_later(name);
    }
    for (name, running, rest) in resting {
        goes_on(&name, &running, rest);
    }
}

/// Serializes a suspended virtual machine's client.
fn client(name: &str, running: &Running, rest: &Rest, host: &ManagedCard) -> Result<Client, String> {
    let failed = |what: &dyn std::fmt::Display| format!("VM `{name}`: {what}");
    let id = running.backend.scheduled_as().ok_or_else(|| failed(&"it is not mediated"))?;
    let (saved, of_clients) = rest.parked.save(&running.link).map_err(|error| failed(&error))?;
    let mut descriptors: Vec<_> = of_clients.into_iter().map(|fd| (format!("{CLIENTS}{name}"), fd)).collect();
    // Sockets from the service manager are handed over separately.
    if running.socket.is_some() {
        let listener = rest.listener().map_err(|error| failed(&error))?;
        descriptors.push((format!("{SOCKET}{OF_VM}{name}"), listener));
    }
    let vm = RosterVm {
        name: name.to_owned(),
        id: id.0,
        vram_bytes: host.lock().vram().chunks.vm_bytes(id).ok_or_else(|| failed(&"it has no memory"))?,
        memory_not_shared: running.seen.memory_not_shared.load(Ordering::Relaxed),
        resets: running.seen.resets.load(Ordering::Relaxed),
    };
    Ok(Client { vm, saved, descriptors })
}

/// Quiesces a card, serializes it, and waits for the outcome of the upgrade.
fn rest(
    going: &Going,
    until: Instant,
    settled: &mpsc::Sender<Result<Settled, String>>,
    verdict: &mpsc::Receiver<bool>,
) {
    let Movable { host, card, .. } = &going.movable;
    let still = match host.stand_still(STILL_LIMIT) {
        Ok(still) => still,
        Err(error) => {
            let _nobody = settled.send(Err(error.to_string()));
            return;
        }
    };
    let halted = card.halted();
    let _nobody = settled.send(settle(going, until, &still, &halted));
    if verdict.recv().unwrap_or(false) {
        halted.leave();
        still.give_away();
    } else {
        drop((halted, still));
    }
}

/// Serializes a quiescent card with its virtual machines, and halts the card.
fn settle(going: &Going, until: Instant, still: &Standstill<'_>, halted: &HaltedCard<'_>) -> Result<Settled, String> {
    let (host, sides) = loop {
        let mut sides = Vec::new();
        let mut save = |(_, running): &(String, Arc<Running>)| {
            let vm = running.backend.mediated().ok_or(ManagerError::OutOfService)?;
            let (saved, side) = vm.save()?;
            sides.push((saved.vm, side));
            Ok::<_, ManagerError>(saved)
        };
        match still.save(|| going.vms.iter().map(&mut save).collect()) {
            Ok(saved) => break (saved, sides),
            Err(ManagerError::Unsettled(_)) if Instant::now() < until => thread::sleep(RETRY_INTERVAL),
            Err(error) => return Err(error.to_string()),
        }
    };
    let card = halted.write_down(until).map_err(|error| error.to_string())?;
    Ok(Settled { host, sides, card })
}

/// Writes a card's file, including the clients of its virtual machines.
fn write(
    going: &Going,
    settled: Settled,
    resting: &[(String, Arc<Running>, Rest)],
    reads: &[Known],
) -> Result<Written, String> {
    let Movable { host, card, .. } = &going.movable;
    let Settled { host: saved, sides, card: state } = settled;
    let name = &going.name;
    let text = |error: &dyn std::fmt::Display| format!("card `{name}`: {error}");
    let mut file = Writer::for_reader(IDENTITY, reads.to_vec());
    let mut descriptors = Vec::new();
    let mut vms = Vec::new();
    for (vm, running, rest) in resting.iter().filter(|(vm, ..)| going.vms.iter().any(|(of, _)| of == vm)) {
        let Client { vm, saved, descriptors: its } = client(vm, running, rest, host)?;
        file.put(vm.id, &saved).map_err(|error| text(&error))?;
        descriptors.extend(its);
        vms.push(vm);
    }
    saved.write(&mut file).map_err(|error| text(&error))?;
    state.put(&mut file).map_err(|error| text(&error))?;
    for (vm, mut side) in sides {
        side.write(vm, &mut file).map_err(|error| text(&error))?;
        let apertures = vms.iter().find(|one: &&RosterVm| one.id == vm.0).map(|one| format!("{APERTURES}{}", one.name));
        descriptors.extend(side.take_files().into_iter().filter_map(|fd| Some((apertures.clone()?, fd))));
    }
    let vram = card.vram_file().ok_or_else(|| text(&"its memory is not shared"))?;
    let vram = vram.try_clone().map_err(|error| text(&error))?;
    descriptors.push((format!("{VRAM}{name}"), vram.into()));
    if let Some(memory) = host.host_memory() {
        let memory = memory.try_clone().map_err(|error| text(&error))?;
        descriptors.push((format!("{HOST_MEMORY}{name}"), memory.into()));
    }
    Ok(Written { file: file.finish(), vms, descriptors })
}

fn no(why: impl std::fmt::Display) -> DaemonError {
    DaemonError::NotHandedOver(why.to_string())
}
