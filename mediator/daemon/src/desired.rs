//! Compares a desired state with the current state, and applies a desired state.
//!
//! A document lists objects and the keys to set; other keys do not change. The whole document is checked before any
//! change is made. A change to a fixed setting is reported as an obstacle, with a remedy.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::draining::Arrival;
use super::{Daemon, DaemonError, State};
use api::{Action, Applied, CardSettings, Comparison, Desired, ErrorCode, EventKind, Exported, KeyChange, Kind, Step};
use config::check::{self, MAX_TENANTS, MAX_VMS, RefusalKind};
use config::patch::{Difference, differences, patched, table, with};
use config::profile::Of;
use config::{CardSpec, TenantSpec, VmSpec, live};
use events::NewEvent;
use listening::account;
use overrides::Tuning;

/// Key that marks a card as drained.
const DRAINED: &str = "drained";

/// Reason why part of a desired state is rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// Kind of the error.
    pub code: ErrorCode,
    /// Kind and name of the object.
    pub of: String,
    /// Error message.
    pub what: String,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.of, self.what)
    }
}

/// An object of a document, with its step.
struct Item {
    step: Step,
    /// Desired virtual machine, if the object is one.
    vm: Option<VmSpec>,
    /// Desired tenant, if the object is one.
    tenant: Option<TenantSpec>,
}

impl Item {
    fn new(step: Step) -> Self {
        Self { step, vm: None, tenant: None }
    }
}

/// Steps and obstacles of a document.
#[derive(Default)]
struct Plan {
    items: Vec<Item>,
    obstacles: Vec<Obstacle>,
}

impl Daemon {
    /// Returns all settings that operators can change.
    #[must_use]
    pub fn export(&self) -> Exported {
        let state = self.state.lock();
        let card = |(name, tuning): (&String, &Tuning)| {
            let Tuning { scheduler, memory, drained } = *tuning;
            CardSettings { name: name.clone(), drained, memory, scheduler }
        };
        Exported {
            revision: state.revision.to_string(),
            card: state.tunings.iter().map(card).collect(),
            vm: state.vms.values().map(|entry| entry.spec.clone()).collect(),
            tenant: state.tenants.values().filter(|tenant| !state.coming.contains(&tenant.name)).cloned().collect(),
        }
    }

    /// Returns the differences from `desired`. With `exact`, also returns virtual machines and tenants that are not in
    /// `desired`.
    ///
    /// # Errors
    /// Returns an error if `desired` has invalid keys or values.
    pub fn compare(&self, desired: &Desired, exact: bool) -> Result<Comparison, DaemonError> {
        let state = self.state.lock();
        let Plan { items, obstacles } = self.plan(&state, desired, exact);
        if !obstacles.is_empty() {
            return Err(DaemonError::Desired(obstacles));
        }
        let differences = items.into_iter().map(|item| item.step).filter(|step| step.action != Action::Keep);
        Ok(Comparison { revision: state.revision.to_string(), differences: differences.collect() })
    }

    /// Applies `desired`. With `prune`, removes virtual machines and tenants that are not in `desired`. With `dry_run`,
    /// only reports the steps.
    ///
    /// # Errors
    /// Returns an error if a revision differs, or if part of `desired` is rejected; in these cases, nothing is changed.
    /// If a step fails, the error lists the completed steps. Also returns an error if the changes cannot be saved.
    pub fn apply(
        &self,
        desired: &Desired,
        prune: bool,
        dry_run: bool,
        expected: Option<&str>,
    ) -> Result<Applied, DaemonError> {
        let mut done = Vec::new();
        let one_at_a_time = self.changing.lock();
        let (carried_out, of_owners) = {
            let _nothing_else = self.tuning.lock();
            let mut plan = {
                let state = self.state.lock();
                state.expect(expected)?;
                state.expect(desired.revision.as_deref())?;
                let mut plan = self.plan(&state, desired, prune);
                self.judge(&state, &mut plan);
                plan
            };
            if !plan.obstacles.is_empty() {
                return Err(DaemonError::Desired(plan.obstacles));
            }
            plan.items.sort_by_key(|item| turn(&item.step));
            if dry_run {
                let steps = plan.items.into_iter().map(|item| item.step).collect();
                return Ok(Applied { revision: self.revision(), dry_run, steps });
            }
            let (of_owners, items): (Vec<Item>, Vec<Item>) =
                plan.items.into_iter().partition(|item| self.is_of_owner(&item.step));
            (self.carry_out(items, &mut done), of_owners)
        };
        // Other changes must not wait for the owners of CUDA cards.
        drop(one_at_a_time);
        let carried_out = carried_out.and_then(|()| self.carry_out(of_owners, &mut done));
        self.keep()?;
        let words: Vec<_> = done.iter().filter(|step| step.action != Action::Keep).map(in_words).collect();
        if let Err(error) = &carried_out {
            self.events
                .add(NewEvent::daemon(EventKind::Applied, format!("a desired state was applied partially: {error}")));
        } else if !words.is_empty() {
            self.events.add(NewEvent::daemon(EventKind::Applied, format!("a desired state: {}", words.join(", "))));
        }
        carried_out?;
        Ok(Applied { revision: self.revision(), dry_run, steps: done })
    }

    /// Returns the steps that lead to `desired`, with obstacles for invalid keys and values. Does not check whether the
    /// steps are possible. With `all`, includes steps that remove the virtual machines and tenants that are not in
    /// `desired`.
    fn plan(&self, state: &State, desired: &Desired, all: bool) -> Plan {
        let mut plan = Plan::default();
        if let Some(patch) = &desired.daemon {
            let (step, _) = plan.compared(Kind::Daemon, "", &self.spec, patch, Clone::clone);
            plan.items.extend(step.map(Item::new));
        }
        for (index, patch) in desired.card.iter().enumerate() {
            let Some(name) = plan.name(Kind::Card, index, patch) else { continue };
            let Some(spec) = self.specs.iter().find(|card| card.name == name) else {
                let known: Vec<_> = self.specs.iter().map(|card| format!("`{}`", card.name)).collect();
                let what = format!("there is no such card, expected {}", known.join(" or "));
                plan.say(ErrorCode::NotFound, described(Kind::Card, &name), what);
                continue;
            };
            let now = state.tuning(spec).on(spec);
            let (step, wanted) = plan.compared(Kind::Card, &name, &now, patch, CardSpec::whole);
            if let Some(card) = wanted {
                for what in check::card_settings(&card) {
                    plan.say(ErrorCode::Invalid, described(Kind::Card, &name), what);
                }
            }
            plan.items.extend(step.map(Item::new));
        }
        for (index, patch) in desired.vm.iter().enumerate() {
            let Some(name) = plan.name(Kind::Vm, index, patch) else { continue };
            let patch = match self.expanded(patch, Of::Vm) {
                Ok(patch) => patch,
                Err(what) => {
                    plan.say(ErrorCode::Invalid, described(Kind::Vm, &name), what);
                    continue;
                }
            };
            let Some(entry) = state.vms.get(&name) else {
                match VmSpec::from_table(&patch) {
                    Ok(vm) => {
                        let step = Step { kind: Kind::Vm, name, action: Action::Create, changes: Vec::new() };
                        plan.items.push(Item { vm: Some(vm), ..Item::new(step) });
                    }
                    Err(what) => plan.say(ErrorCode::Invalid, described(Kind::Vm, &name), what),
                }
                continue;
            };
            let whole = |vm: &VmSpec| vm.whole(&self.spec.socket_dir);
            let (step, vm) = plan.compared(Kind::Vm, &name, &entry.spec, &patch, whole);
            plan.items.extend(step.map(|step| Item { vm, ..Item::new(step) }));
        }
        self.plan_tenants(&mut plan, state, desired);
        let values = |vm: &VmSpec| {
            let refusals = check::vm(vm, &self.spec, &self.specs, &[]);
            let wrong = refusals.into_iter().filter(|refusal| refusal.kind == RefusalKind::Invalid);
            wrong.map(|refusal| format!("{}: {}", refusal.field, refusal.what)).collect::<Vec<_>>()
        };
        let wrong = plan.items.iter().filter_map(|item| item.vm.as_ref()).flat_map(|vm| {
            let of = described(Kind::Vm, &vm.name);
            values(vm).into_iter().map(move |what| Obstacle { code: ErrorCode::Invalid, of: of.clone(), what })
        });
        let mut wrong: Vec<_> = wrong.collect();
        plan.obstacles.append(&mut wrong);
        if all {
            let vms = state.vms.keys().map(|name| (Kind::Vm, name));
            let there = vms.chain(state.tenants.keys().map(|name| (Kind::Tenant, name)));
            let named =
                |kind, name: &String| plan.items.iter().any(|item| item.step.kind == kind && item.step.name == *name);
            let others: Vec<_> = there.filter(|(kind, name)| !named(*kind, name)).collect();
            plan.items.extend(others.into_iter().map(|(kind, name)| {
                Item::new(Step { kind, name: name.clone(), action: Action::Remove, changes: Vec::new() })
            }));
        }
        plan
    }

    /// Adds the steps for tenants to a plan.
    fn plan_tenants(&self, plan: &mut Plan, state: &State, desired: &Desired) {
        for (index, patch) in desired.tenant.iter().enumerate() {
            let Some(name) = plan.name(Kind::Tenant, index, patch) else { continue };
            let patch = match self.expanded(patch, Of::Tenant) {
                Ok(patch) => patch,
                Err(what) => {
                    plan.say(ErrorCode::Invalid, described(Kind::Tenant, &name), what);
                    continue;
                }
            };
            let Some(now) = state.tenants.get(&name) else {
                match TenantSpec::from_table(&patch) {
                    Ok(tenant) => {
                        let step = Step { kind: Kind::Tenant, name, action: Action::Create, changes: Vec::new() };
                        plan.items.push(Item { tenant: Some(tenant), ..Item::new(step) });
                    }
                    Err(what) => plan.say(ErrorCode::Invalid, described(Kind::Tenant, &name), what),
                }
                continue;
            };
            let whole = |tenant: &TenantSpec| tenant.whole(&self.spec.socket_dir);
            let (step, tenant) = plan.compared(Kind::Tenant, &name, now, &now.without_number(patch), whole);
            plan.items.extend(step.map(|step| Item { tenant, ..Item::new(step) }));
        }
    }

    /// Returns the obstacles to the tenants of a plan. `vms` are the virtual machines that exist after the plan.
    fn judge_tenants(&self, state: &State, plan: &Plan, vms: &[&VmSpec]) -> Vec<Obstacle> {
        let vms: Vec<&str> = vms.iter().map(|vm| vm.name.as_str()).collect();
        let changed =
            |name: &String| plan.items.iter().find(|item| item.step.kind == Kind::Tenant && item.step.name == *name);
        let staying = state.tenants.iter().filter_map(|(name, now)| match changed(name) {
            Some(Item { step: Step { action: Action::Remove, .. }, .. }) => None,
            Some(Item { tenant: Some(tenant), .. }) => Some(tenant),
            _ => Some(now),
        });
        let new = plan.items.iter().filter(|item| item.step.action == Action::Create);
        let (cards, links) = (plan.marked(state.marked(&self.specs)), self.links());
        let mut there: Vec<TenantSpec> = Vec::new();
        let mut obstacles = Vec::new();
        let staying = staying.map(|tenant| (Arrival::Configured, tenant));
        let new = new.filter_map(|item| item.tenant.as_ref()).map(|tenant| (Arrival::New, tenant));
        for (arrival, tenant) in staying.chain(new) {
            let others: Vec<&TenantSpec> = there.iter().collect();
            let tenant = tenant.clone().placed((self.spec.placement, &links), &cards, &vms, &others);
            let of = described(Kind::Tenant, &tenant.name);
            let mut refusals = check::tenant(&tenant, &self.spec, &cards, &vms, &others);
            refusals.extend(tenant.card_names().iter().filter_map(|card| arrival.refused(card, &cards)));
            obstacles.extend(refusals.into_iter().map(|refusal| Obstacle {
                code: code_of(refusal.kind),
                of: of.clone(),
                what: format!("{}: {}", refusal.field, refusal.what),
            }));
            if let Err(error) = account::socket_options(tenant.mode, tenant.owner.as_deref(), tenant.group.as_deref()) {
                obstacles.push(Obstacle { code: ErrorCode::Invalid, of, what: error.to_string() });
            }
            there.push(tenant);
        }
        if there.len() > MAX_TENANTS {
            let what = format!(
                "there would be {} tenants, but one daemon serves at most {MAX_TENANTS}; omit some",
                there.len()
            );
            obstacles.push(Obstacle { code: ErrorCode::Quota, of: "all tenants".to_owned(), what });
        }
        obstacles
    }

    /// Checks whether a plan's steps are possible, and adds the obstacles to the plan.
    fn judge(&self, state: &State, plan: &mut Plan) {
        let mut obstacles = Vec::new();
        for Item { step, vm, .. } in &plan.items {
            let is_function = vm.as_ref().is_some_and(|vm| vm.cuda.is_some());
            let fixed = step.changes.iter().filter(|change| !changeable(step.kind, is_function, &change.key));
            obstacles.extend(fixed.map(|change| fixed_key(step, change)));
        }
        // Check the virtual machines that exist after the plan. Existing ones come first, because they have priority.
        let changed =
            |name: &String| plan.items.iter().find(|item| item.step.kind == Kind::Vm && item.step.name == *name);
        let staying = state.vms.iter().filter_map(|(name, entry)| match changed(name) {
            Some(Item { step: Step { action: Action::Remove, .. }, .. }) => None,
            Some(Item { vm: Some(vm), .. }) => Some(vm),
            _ => Some(&entry.spec),
        });
        let new =
            plan.items.iter().filter(|item| item.step.action == Action::Create).filter_map(|item| item.vm.as_ref());
        let cards = plan.marked(state.marked(&self.specs));
        let mut placed: Vec<VmSpec> = Vec::new();
        let (staying, new) = (staying.map(|vm| (Arrival::Configured, vm)), new.map(|vm| (Arrival::New, vm)));
        for (arrival, vm) in staying.chain(new) {
            let there: Vec<&VmSpec> = placed.iter().collect();
            let vm = vm.clone().placed(&self.spec, &cards, &there);
            let say = |code, what| Obstacle { code, of: described(Kind::Vm, &vm.name), what };
            let mut refusals = check::vm(&vm, &self.spec, &cards, &there);
            refusals.extend(arrival.refused(&vm.card, &cards));
            obstacles.extend(refusals.into_iter().filter_map(|refusal| {
                // Invalid values have already been reported.
                let told = refusal.kind != RefusalKind::Invalid;
                told.then(|| say(code_of(refusal.kind), format!("{}: {}", refusal.field, refusal.what)))
            }));
            if let Err(error) = account::socket_options(vm.mode, vm.owner.as_deref(), vm.group.as_deref()) {
                obstacles.push(say(ErrorCode::Invalid, error.to_string()));
            }
            placed.push(vm);
        }
        let there: Vec<&VmSpec> = placed.iter().collect();
        if there.len() > MAX_VMS {
            let what =
                format!("there would be {} VMs, but one daemon serves at most {MAX_VMS}; omit some", there.len());
            obstacles.push(Obstacle { code: ErrorCode::Quota, of: "all VMs".to_owned(), what });
        }
        let shared = |step: &Step| step.kind == Kind::Card && step.changes.iter().any(|change| change.key != DRAINED);
        let tuned = plan.items.iter().filter(|item| shared(&item.step) && item.step.action == Action::Change);
        for Item { step, .. } in tuned {
            if let Some(vm) = there.iter().find(|vm| vm.passthrough && vm.card == step.name) {
                let what =
                    format!("scheduler: VM `{}` uses the card in passthrough, so the card has no scheduler", vm.name);
                obstacles.push(Obstacle { code: ErrorCode::Conflict, of: described(Kind::Card, &step.name), what });
            }
        }
        obstacles.extend(self.judge_tenants(state, plan, &there));
        plan.obstacles.append(&mut obstacles);
    }

    /// Returns true if the owner of a CUDA card executes the step.
    fn is_of_owner(&self, step: &Step) -> bool {
        let cuda = |card: &String| self.cards.get(card).is_some_and(|card| card.cuda.is_some());
        step.kind == Kind::Tenant || (step.kind == Kind::Card && cuda(&step.name))
    }

    /// Executes steps in order, and adds each completed step to `done`. The caller must hold `changing` and `tuning`,
    /// except for steps that owners of CUDA cards execute.
    fn carry_out(&self, items: Vec<Item>, done: &mut Vec<Step>) -> Result<(), DaemonError> {
        for Item { step, vm, tenant } in items {
            let result = match (step.action, step.kind) {
                (Action::Keep, _) | (_, Kind::Daemon) | (Action::Create | Action::Remove, Kind::Card) => Ok(()),
                (Action::Remove, Kind::Vm) => self.take_out(&step.name, None),
                (Action::Remove, Kind::Tenant) => self.take_tenant(&step.name, None),
                (Action::Create, Kind::Vm) => {
                    vm.map_or(Ok(()), |vm| self.reserve(vm, None, Arrival::New).and_then(|vm| self.fill(&vm).map(drop)))
                }
                (Action::Create, Kind::Tenant) => {
                    tenant.map_or(Ok(()), |tenant| self.put_tenant(tenant, None, Arrival::New))
                }
                (Action::Change, Kind::Card) => self.change_card(&step),
                (Action::Change, Kind::Vm) => self.change_vm(&step),
                (Action::Change, Kind::Tenant) => self.change_tenant(&step),
            };
            if let Err(error) = result {
                let done: Vec<_> = done.iter().filter(|step| step.action != Action::Keep).map(in_words).collect();
                let done = if done.is_empty() { "nothing".to_owned() } else { done.join(", ") };
                return Err(DaemonError::Partly { error: Box::new(error), done });
            }
            done.push(step);
        }
        Ok(())
    }
}

impl Daemon {
    /// Applies the changes in a card's step. If the step drains the card, the card keeps its virtual machines and
    /// tenants.
    fn change_card(&self, step: &Step) -> Result<(), DaemonError> {
        let [scheduler, memory] = ["scheduler", "memory"].map(|table| within(step, table));
        if let Some(drained) = drained_by(step) {
            self.mark(&step.name, drained, None)?;
        }
        if scheduler.is_empty() && memory.is_empty() {
            return Ok(());
        }
        if let Some(cuda) = self.known(&step.name)?.cuda.as_deref() {
            return self.tune_cuda(cuda, &scheduler, &memory, None);
        }
        if !scheduler.is_empty() {
            self.tune_card(&step.name, &scheduler, None)?;
        }
        if !memory.is_empty() {
            self.tune_memory(&step.name, &memory, None)?;
        }
        Ok(())
    }

    /// Applies the changes in a tenant's step.
    fn change_tenant(&self, step: &Step) -> Result<(), DaemonError> {
        let changes = step.changes.iter().map(|change| (change.key.clone(), change.to.clone()));
        let patch = with(&Map::new(), &changes.collect()).unwrap_or_default();
        self.tune_tenant(&step.name, &patch, None, "")
    }

    /// Applies the changes in a virtual machine's step.
    fn change_vm(&self, step: &Step) -> Result<(), DaemonError> {
        if self.is_tenant(&step.name) {
            return self.change_tenant(step);
        }
        let [time, memory] = ["time", "memory"].map(|table| within(step, table));
        if !time.is_empty() {
            self.tune_vm(&step.name, &time, None)?;
        }
        if !memory.is_empty() {
            self.tune_vm_memory(&step.name, &memory, None)?;
        }
        Ok(())
    }
}

impl Plan {
    /// Returns `cards` with the drain marks that the plan sets or clears.
    fn marked(&self, mut cards: Vec<CardSpec>) -> Vec<CardSpec> {
        let steps = || self.items.iter().map(|item| &item.step).filter(|step| step.kind == Kind::Card);
        for card in &mut cards {
            let by_step = steps().find(|step| step.name == card.name).and_then(drained_by);
            card.drained = by_step.unwrap_or(card.drained);
        }
        cards
    }

    fn say(&mut self, code: ErrorCode, of: String, what: String) {
        self.obstacles.push(Obstacle { code, of, what });
    }

    /// Returns the name in a table. If it is missing or a duplicate, adds an obstacle and returns `None`.
    fn name(&mut self, kind: Kind, index: usize, table: &Map<String, Value>) -> Option<String> {
        let Some(name) = table.get("name").and_then(Value::as_str) else {
            let table = match kind {
                Kind::Daemon => "daemon",
                Kind::Card => "card",
                Kind::Vm => "vm",
                Kind::Tenant => "tenant",
            };
            let of = format!("{table}[{index}]");
            self.say(ErrorCode::Invalid, of, "name: expected the name of the object".to_owned());
            return None;
        };
        if self.items.iter().any(|item| item.step.kind == kind && item.step.name == name) {
            self.say(ErrorCode::Invalid, described(kind, name), "duplicate table".to_owned());
            return None;
        }
        Some(name.to_owned())
    }

    /// Applies a patch to `now`. Returns the step with the changed keys, and the result. `whole` fills in the defaults
    /// of unset keys before the comparison.
    fn compared<T: Serialize + DeserializeOwned>(
        &mut self,
        kind: Kind,
        name: &str,
        now: &T,
        patch: &Map<String, Value>,
        whole: impl Fn(&T) -> T,
    ) -> (Option<Step>, Option<T>) {
        let compared = patched(now, patch).and_then(|wanted| {
            let differences = differences(&table(&whole(now))?, &table(&whole(&wanted))?);
            Ok((wanted, differences))
        });
        match compared {
            Ok((wanted, differences)) => {
                let change = |Difference { key, from, to }| KeyChange { key, from, to };
                let changes: Vec<_> = differences.into_iter().map(change).collect();
                let action = if changes.is_empty() { Action::Keep } else { Action::Change };
                (Some(Step { kind, name: name.to_owned(), action, changes }), Some(wanted))
            }
            Err(what) => {
                self.say(ErrorCode::Invalid, described(kind, name), what);
                (None, None)
            }
        }
    }
}

/// Returns a step's position in the execution order, which frees memory before using it.
fn turn(step: &Step) -> u8 {
    match (step.action, step.kind) {
        (Action::Remove, _) => 0,
        (_, Kind::Daemon) => 1,
        (_, Kind::Card) => 2,
        (Action::Keep | Action::Change, Kind::Vm | Kind::Tenant) => 3,
        (Action::Create, Kind::Vm | Kind::Tenant) => 4,
    }
}

fn described(kind: Kind, name: &str) -> String {
    match kind {
        Kind::Daemon => "the daemon".to_owned(),
        Kind::Card => format!("card `{name}`"),
        Kind::Vm => format!("VM `{name}`"),
        Kind::Tenant => format!("tenant `{name}`"),
    }
}

fn code_of(kind: RefusalKind) -> ErrorCode {
    match kind {
        RefusalKind::Invalid => ErrorCode::Invalid,
        RefusalKind::UnknownCard => ErrorCode::NotFound,
        RefusalKind::Conflict => ErrorCode::Conflict,
        RefusalKind::Quota => ErrorCode::Quota,
    }
}

/// Returns true if a step drains a card, false if it undrains one, and `None` otherwise.
fn drained_by(step: &Step) -> Option<bool> {
    step.changes.iter().find(|change| change.key == DRAINED)?.to.as_bool()
}

/// Returns true if a key can be changed. `is_function` is true for a VM with CUDA programs.
fn changeable(kind: Kind, is_function: bool, key: &str) -> bool {
    match kind {
        Kind::Daemon => false,
        Kind::Card => live::of_card(key),
        Kind::Vm if is_function => live::of_function(key),
        Kind::Vm => live::of_vm(key),
        Kind::Tenant => live::of_tenant(key),
    }
}

fn fixed_key(step: &Step, change: &KeyChange) -> Obstacle {
    let KeyChange { key, from, to } = change;
    let what = match step.kind {
        Kind::Vm => format!(
            "{key} is {from} and cannot become {to} while the VM exists; remove it (`mediatorctl vm remove {}`) and \
             apply again, or omit the key",
            step.name
        ),
        Kind::Tenant => format!(
            "{key} is {from} and cannot become {to} while the tenant exists; remove it (`mediatorctl tenant remove \
             {}`) and apply again, or omit the key",
            step.name
        ),
        Kind::Card | Kind::Daemon => format!(
            "{key} is {from} and cannot become {to} while the daemon runs; change the configuration file and restart \
             the daemon, or omit the key"
        ),
    };
    Obstacle { code: ErrorCode::Conflict, of: described(step.kind, &step.name), what }
}

/// Returns a step's changes to one table, as a patch.
fn within(step: &Step, table: &str) -> Map<String, Value> {
    let inner =
        |change: &KeyChange| Some((change.key.strip_prefix(table)?.strip_prefix('.')?.to_owned(), change.to.clone()));
    with(&Map::new(), &step.changes.iter().filter_map(inner).collect()).unwrap_or_default()
}

fn in_words(step: &Step) -> String {
    let what = described(step.kind, &step.name);
    match step.action {
        Action::Keep => format!("{what} stays"),
        Action::Create => format!("{what} is added"),
        Action::Change => format!("{what} is changed"),
        Action::Remove => format!("{what} is removed"),
    }
}
