//! Runs the owner of a card as the daemon's child process. The owner reads one request per line and replies to each.
//!
//! The owner is a separate process because a crash in NVIDIA's driver must not affect the cards of virtual machines.

use crate::core::{
    CardConfig, CardView, Core, Leaving, OnStranger, OnStuck, ShareGroup, TenantError, TenantSpec, TenantView,
    Unaccounted,
};
use crate::server::{MpsOptions, Rights, Server};
use cuda_control::{Answer, Card, GangSettings, MpsSettings, Request, ServerState, Settings, Tenant};
use owner_driver::{Driver, Real, nvml_uuid, parse_uuid};
use owner_host::rules;
use sched::VgpuParams;
use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vram::{Limits, TenantId};

/// Serves requests until end of file on `input`. Afterwards, programs keep their memory and try to connect to the next
/// owner.
///
/// # Errors
/// Returns an error if `output` is closed.
pub fn serve(input: impl BufRead, mut output: impl Write) -> io::Result<()> {
    let mut lines = input.lines();
    let Some(first) = lines.next().transpose()? else { return Ok(()) };
    let real = |settings: &Settings| {
        let driver = Real::find(&settings.driver, &settings.device).map_err(|error| error.to_string())?;
        Ok(Arc::new(driver) as Arc<dyn Driver>)
    };
    let (mut pipe, ready) = match Pipe::open(&first, real, true) {
        Ok(opened) => opened,
        Err(error) => return say(&mut output, &Answer::Failed(error)),
    };
    say(&mut output, &ready)?;
    for line in lines {
        say(&mut output, &pipe.answer(&line?))?;
    }
    Ok(())
}

fn say(output: &mut impl Write, answer: &Answer) -> io::Result<()> {
    let mut text = serde_json::to_vec(answer)?;
    text.push(b'\n');
    output.write_all(&text)?;
    output.flush()
}

/// An owner that receives requests as lines, and the folder of its MPS servers.
pub(crate) struct Pipe(Server, Option<PathBuf>);

impl Pipe {
    /// Starts the owner with the settings in the first line. `open` opens its card. If `watches` is set, monitors the
    /// processes that use the card.
    pub(crate) fn open(
        line: &str,
        open: impl FnOnce(&Settings) -> Result<Arc<dyn Driver>, String>,
        watches: bool,
    ) -> Result<(Self, Answer), String> {
        let settings: Settings = serde_json::from_str(line).map_err(|error| format!("invalid settings: {error}"))?;
        let driver = open(&settings)?;
        let owner_driver::Device { name, uuid, total_bytes, .. } = driver.device().clone();
        if settings.card_bytes > total_bytes {
            return Err(format!(
                "the settings share {} bytes, but the card {name} has {total_bytes}",
                settings.card_bytes
            ));
        }
        let mut config = CardConfig::new(settings.card_bytes);
        config.host_bytes = settings.host_bytes;
        config.host_ready_bytes = settings.host_ready_bytes;
        config.chunk_bytes = settings.chunk_bytes;
        config.turns.slice_ns = settings.slice_ns;
        config.run_ahead_us = settings.run_ahead_us;
        (config.time, config.balance, config.quanta) = rules(&settings.rules, settings.chunk_bytes)?;
        config.on_stranger = if settings.kills_strangers { OnStranger::Kill } else { OnStranger::Report };
        config.margin_bytes = settings.margin_bytes;
        config.others = settings.others.iter().filter_map(|other| driver.uuid_of(other)).collect();
        config.number = settings.gangs.as_ref().map_or(config.number, |gangs| gangs.card);
        let server = Server::start_closed(config, driver, Some(&settings.journal));
        let mut server = server.map_err(|error| error.to_string())?;
        if watches {
            server.watch_users(&settings.driver, uuid).map_err(|error| error.to_string())?;
        }
        if let Some(GangSettings { card, socket }) = &settings.gangs
            && let Err(error) = server.listen_for_owners(*card, socket)
        {
            tracing::error!(%error, "tenants with several cards get no turns");
        }
        let mps = settings.mps.clone();
        if let Some(MpsSettings { program, folder }) = mps.clone() {
            server.serve_mps(MpsOptions { program, folder, card: nvml_uuid(uuid) });
        }
        let links = if watches { owner_driver::links(&settings.driver, uuid) } else { BTreeMap::new() };
        Ok((Self(server, mps.map(|mps| mps.folder)), Answer::Ready { name, uuid: nvml_uuid(uuid), total_bytes, links }))
    }

    /// Executes the request in one line, and returns the reply.
    pub(crate) fn answer(&mut self, line: &str) -> Answer {
        match serde_json::from_str(line) {
            Ok(request) => answer(&mut self.0, self.1.as_deref(), request).unwrap_or_else(Answer::Failed),
            Err(error) => Answer::Failed(format!("invalid request: {error}")),
        }
    }
}

/// Error for requests after the owner's thread has exited.
const ENDED: &str = "the owner has exited";
/// Error for moves that the driver does not support.
const NO_MOVES: &str = "NVIDIA's driver cannot move programs between cards: install version 580 or later";

/// Returns the tenant called `name`.
fn known(server: &Server, name: String) -> Result<TenantId, String> {
    let found = server.call(move |core| core.tenant(&name).ok_or_else(|| format!("there is no tenant `{name}`")));
    found.ok_or(ENDED)?
}

fn answer(server: &mut Server, mps: Option<&Path>, request: Request) -> Result<Answer, String> {
    match request {
        Request::Add(tenant) => {
            let (spec, rights) = spec(server, &tenant)?;
            let id = match promise(server, move |core| core.add_tenant(spec))? {
                Ok(id) => id,
                Err(later) => return Ok(later),
            };
            if tenant.arrives {
                server.hold_socket(id, tenant.socket, rights);
            } else if let Err(error) = server.listen(Some(id), &tenant.socket, &rights) {
                let _ = server.call(move |core| core.remove_tenant(id));
                return Err(error.to_string());
            }
            tenant.gang.into_iter().for_each(|gang| server.link_with(id, gang.cards));
            Ok(Answer::Done)
        }
        Request::Change(tenant) => {
            let (spec, _) = spec(server, &tenant)?;
            let id = known(server, spec.name.clone())?;
            let changed = promise(server, move |core| core.change_tenant(id, &spec))?;
            Ok(changed.map_or_else(|later| later, |()| Answer::Done))
        }
        Request::Remove { name, kills } => {
            let known = name.clone();
            let there =
                server.call(move |core| core.tenant(&known).ok_or_else(|| core.lingering(&known))).ok_or(ENDED)?;
            let pids = match there {
                Ok(id) => {
                    // Stop accepting connections before counting the connected programs.
                    server.unlisten(id);
                    server.link_with(id, BTreeMap::new());
                    let retired = server.call(move |core| core.retire_tenant(id, kills)).ok_or(ENDED)?;
                    retired.map_err(|error| error.to_string())?
                }
                // The tenant is removed, but some of its processes are still running.
                Err(pids) => pids,
            };
            Ok(if pids.is_empty() { Answer::Done } else { Answer::Leaving(pids) })
        }
        Request::MayLeave { .. } | Request::Leave(_) if !server.fetches() => Err(NO_MOVES.to_owned()),
        Request::MayLeave { name, to } => {
            let (id, to) = (known(server, name)?, parse_uuid(&to).ok_or_else(|| format!("`{to}` is not a UUID"))?);
            let waits = server.call(move |core| core.may_leave(id, to)).ok_or(ENDED)??;
            Ok(waits.map_or(Answer::Done, Answer::Moving))
        }
        Request::Leave(name) => {
            let id = known(server, name)?;
            match server.call(move |core| core.leave(id)).ok_or(ENDED)?? {
                Leaving::Waits(why) => Ok(Answer::Moving(why)),
                Leaving::Left(pids) => Ok(Answer::Left(pids)),
            }
        }
        Request::Stay(name) => {
            let id = known(server, name)?;
            server.call(move |core| core.stay(id)).map(|()| Answer::Done).ok_or_else(|| ENDED.to_owned())
        }
        Request::Arrive { name, pids } => {
            let id = known(server, name)?;
            server.expect(id, pids);
            server.release_socket(id).map(|()| Answer::Done).map_err(|error| error.to_string())
        }
        Request::Arrivals(name) => {
            let id = known(server, name)?;
            let (here, times, failed) = server.call(move |core| core.arrivals(id)).ok_or(ENDED)?;
            Ok(Answer::Arrived { here, failed, times })
        }
        Request::Tune(changed) => {
            let chunk_bytes = server.call(|core| core.config().chunk_bytes).ok_or(ENDED)?;
            let (time, balance, quanta) = rules(&changed, chunk_bytes)?;
            let tuned = server.call(move |core| core.tune(time, balance, quanta, changed.host_bytes)).ok_or(ENDED)?;
            tuned.map(|()| Answer::Done).map_err(|error| error.to_string())
        }
        Request::Release(name) => {
            let id = known(server, name)?;
            server.call(move |core| core.release(id)).map(|()| Answer::Done).ok_or_else(|| ENDED.to_owned())
        }
        Request::Record(limit) => {
            let begun = server.call(move |core| core.start_record(limit)).ok_or(ENDED)?;
            begun.then_some(Answer::Done).ok_or_else(|| "a recording is already in progress".to_owned())
        }
        Request::EndRecord => {
            let record = server.call(Core::end_record).ok_or(ENDED)?.ok_or("no recording is in progress")?;
            Ok(Answer::Record(String::from_utf8_lossy(&record).into_owned()))
        }
        Request::View { since_ns } => {
            let mps = mps.map(Path::to_owned);
            let shown = server.call(move |core| {
                let incidents = core.take_incidents();
                Card { incidents, ..show(core, since_ns, mps.as_deref()) }
            });
            Ok(Answer::View(Box::new(shown.ok_or(ENDED)?)))
        }
    }
}

/// Runs `attempt`, which guarantees card memory to a tenant. If other tenants use this memory beyond their own
/// guarantees, starts to evict it. Returns the inner error immediately in this case, so that the owner can serve other
/// requests.
fn promise<T: Send + 'static>(
    server: &Server,
    attempt: impl FnOnce(&mut Core) -> Result<T, TenantError> + Send + 'static,
) -> Result<Result<T, Answer>, String> {
    let tried = server.call(move |core| {
        let done = attempt(core);
        let moves = done.as_ref().is_err_and(|refused| core.make_room(refused));
        if !moves {
            core.promised();
        }
        (done, moves)
    });
    match tried.ok_or("the owner has exited")? {
        (Ok(done), _) => Ok(Ok(done)),
        (Err(refused), true) => Ok(Err(Answer::Moving(refused.to_string()))),
        (Err(refused), false) => Err(refused.to_string()),
    }
}

/// Returns the tenant's settings in the core's form, and the access rights of its socket.
fn spec(server: &Server, tenant: &Tenant) -> Result<(TenantSpec, Rights), String> {
    let chunk = server.call(|core| core.config().chunk_bytes).ok_or("the owner has exited")?;
    let chunks = |bytes: u64| u32::try_from(bytes / chunk.max(1)).unwrap_or(u32::MAX);
    let (memory, time) = (&tenant.memory, &tenant.time);
    let class = serde_json::from_value(time.class.as_str().into());
    let spec = TenantSpec {
        name: tenant.name.clone(),
        uid: None,
        memory_bytes: tenant.memory_bytes,
        window_bytes: tenant.window_bytes,
        limits: Limits {
            quota: memory.quota.map_or(u32::MAX, chunks),
            guarantee: chunks(memory.guarantee),
            swap_cap: memory.swap_cap.map_or(u32::MAX, chunks),
            weight: memory.weight,
            on_full: memory.on_full.parse()?,
        },
        time: VgpuParams {
            weight: time.weight,
            guarantee_permille: time.guarantee_permille,
            cap_permille: time.cap_permille,
            class: class.map_err(|error| format!("class: {error}"))?,
            max_run_ns: time.max_run_ns,
            ..VgpuParams::default()
        },
        on_stuck: if tenant.suspends { OnStuck::Suspend } else { OnStuck::Kill },
        share_group: tenant.share_group.clone().map(|name| ShareGroup {
            name,
            sharing: tenant.sharing,
            user: tenant.uid,
        }),
        gang: tenant.gang.clone(),
    };
    Ok((spec, Rights { mode: Some(tenant.mode), uid: tenant.uid, gid: tenant.gid }))
}

fn show(core: &Core, since_ns: u64, mps: Option<&Path>) -> Card {
    let CardView { memory, time, turns, relocations, declined, tenants, unexplained_bytes, .. } = core.view(since_ns);
    // Programs can already become clients while the server is starting.
    let pipes = |tenant: &TenantView| {
        let group = tenant.spec.share_group.as_ref().filter(|_| tenant.server != ServerState::Unused)?;
        Some(cuda_mps::pipe_folder(&cuda_mps::group_folder(mps?, &group.name)))
    };
    let shown = |tenant: TenantView| {
        let pipes = pipes(&tenant);
        let unaccounted = tenant.unaccounted.into_iter();
        let view = cuda_control::TenantView {
            name: tenant.spec.name,
            programs: tenant.programs,
            busy_ns: tenant.busy_ns,
            copy_ns: tenant.copy_ns,
            launches: tenant.launches,
            killed: tenant.killed,
            kill_failures: tenant.kill_failures,
            suspended: tenant.suspended,
            given_up: tenant.given_up.into_iter().map(Into::into).collect(),
            overrun_ns: tenant.overrun_ns,
            unaccounted: unaccounted.map(|Unaccounted { pid, program, bytes }| (pid, program, bytes)).collect(),
            kept_bytes: tenant.kept_bytes,
            over_quota_bytes: tenant.over_quota_bytes,
            sharing: tenant.membership.map(|state| cuda_control::SharingView {
                mode: state.sharing,
                is_together: state.together,
                takes_part: state.joined,
                lack_ns: state.lack_ns,
                not_clients: tenant.not_concurrent.clone(),
                server: tenant.server,
                pipes,
            }),
            gang: tenant.gang.map(Into::into),
        };
        (tenant.id, view)
    };
    Card {
        uuid: nvml_uuid(core.config().uuid),
        memory,
        time,
        turns,
        relocations,
        declined,
        tenants: tenants.into_iter().map(shown).collect(),
        unexplained_bytes,
        incidents: Vec::new(),
        strangers: core.strangers().map(|known| (known.pid, known.program.clone(), known.bytes)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{Event, SessionId};
    use cuda_protocol::{FromTenant, Hello, VERSION};
    use owner_driver::Model;

    #[test]
    fn a_guarantee_that_memory_is_in_the_way_of_is_answered_at_once() {
        const CHUNK: u64 = 2 << 20;
        let mut config = CardConfig::new(8 * CHUNK);
        config.chunk_bytes = CHUNK;
        let server = Server::start_closed(config, Arc::new(Model::new(64 * CHUNK)), None).expect("it starts");
        let spec = |name: &str, guarantee| TenantSpec {
            name: name.into(),
            uid: None,
            memory_bytes: 16 * CHUNK,
            window_bytes: 0,
            limits: Limits { guarantee, ..Limits::default() },
            time: VgpuParams::default(),
            on_stuck: OnStuck::Kill,
            share_group: None,
            gang: None,
        };
        let one = spec("one", 0);
        promise(&server, move |core| core.add_tenant(one)).expect("the request is valid").expect("at once");
        server.call(|core| {
            let hello = Hello {
                version: VERSION,
                pid: 1,
                instance: 1,
                tenant: "one".into(),
                program: String::new(),
                adopts: false,
            };
            let session = SessionId(1 << 20);
            core.handle(1, Event::Connected { session, pid: 1, uid: 0, tenant: None });
            let ask = FromTenant::Allocate { request: 1, card: 0, chunks: 8 };
            for message in [FromTenant::Hello(hello), ask] {
                core.handle(2, Event::Said { session, message, pieces: Vec::new() });
            }
            // No thread executes the actions in this test.
            drop(core.take_actions());
        });
        let (two, more) = (spec("two", 4), spec("three", 9));
        let answer = promise(&server, move |core| core.add_tenant(two)).expect("the guarantee is given later");
        assert!(matches!(answer, Err(Answer::Moving(_))), "{answer:?}");
        assert!(promise(&server, move |core| core.add_tenant(more)).is_err(), "the card never has this much memory");
    }
}
