//! What to do now.
//!
//! The order is that in which memory is cheapest to have. What guests free by themselves (free-page
//! reporting) needs no doing. Then balloons take from guests that do not use what they have; then
//! pages are compressed on their way to swap; then idle guests are swapped out before the kernel
//! picks any. A later means is used for what the earlier ones cannot give, not for what they have
//! not given yet, unless next to nothing is left. Idle guests pay first: a page that is not used
//! counts several times as much as one that is ([`price`], the idle tax of ESXi).
//!
//! Nothing here may make it worse. A balloon never leaves a guest less than its minimum, nor less
//! than it uses and a reserve; a guest that says it is short gets back at once, whatever the host
//! says; and what was taken or given is not turned round soon: who was short is left alone for a
//! while, each time longer, and if giving back brought pressure, the next giving back waits longer.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::config::{IDLE_TAX_PERCENT, ZIP_MAX_PERCENT};
use crate::level::{Gauge, Level, waits, wanted};
use crate::seen::{Guest, Seen};
use crate::{MIB, human};

/// Balloons are moved in pieces of this size.
const PIECE: u64 = 4 * MIB;
/// Between two takings from one guest: the first must have shown what it does.
const TAKE_EVERY_MS: u64 = 2_000;
/// Of what a guest has, what is taken at once.
const TAKE_PART: u64 = 8;
/// Between two givings back, while nothing is short.
const GIVE_EVERY_MS: u64 = 3_000;
/// Of what a guest is assigned, what is given back at once.
const GIVE_PART: u64 = 16;
/// How long nothing must have been short before anything is given back.
const CALM_MS: u64 = 30_000;
/// How long a guest that was short is left alone, and at most.
const REST_MS: u64 = 60_000;
const REST_MAX_MS: u64 = 960_000;
/// Pressure this soon after something was given back is taken to come from that.
const BACKFIRE_MS: u64 = 60_000;
/// Between two givings to a guest that is short.
const HELP_EVERY_MS: u64 = 1_000;
/// Bytes that a guest reads back from its own swap each second, above which it is short.
const SHORT_SWAP_IN: u64 = MIB;
/// Between two goes at swapping out or reading back.
const PAGES_EVERY_MS: u64 = 2_000;
/// Bytes at one go.
const OUT_MAX: u64 = 128 * MIB;
const BACK_MAX: u64 = 32 * MIB;
/// How long nothing is compressed after it was in vain.
const VAIN_MS: u64 = 3_600_000;
/// How long nothing can have helped before that is said.
const HELPLESS_MS: u64 = 10_000;

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Compress pages on their way to swap.
    Compress,
    /// Do so no more.
    StopCompress,
    /// Leave a guest this much.
    Balloon {
        /// The guest.
        guest: String,
        /// Bytes it has.
        from: u64,
        /// Bytes it is to have.
        to: u64,
    },
    /// Swap a guest out.
    PageOut {
        /// The guest.
        guest: String,
        /// Bytes.
        bytes: u64,
    },
    /// Read back what is swapped out of a guest.
    ReadBack {
        /// The guest.
        guest: String,
        /// Bytes.
        bytes: u64,
    },
}

impl Step {
    /// A name that stays.
    pub fn word(&self) -> &'static str {
        match self {
            Step::Compress => "compress",
            Step::StopCompress => "stop-compress",
            Step::Balloon { from, to, .. } if to < from => "balloon-take",
            Step::Balloon { .. } => "balloon-give",
            Step::PageOut { .. } => "page-out",
            Step::ReadBack { .. } => "read-back",
        }
    }

    /// Whom it is about.
    pub fn guest(&self) -> Option<&str> {
        match self {
            Step::Compress | Step::StopCompress => None,
            Step::Balloon { guest, .. }
            | Step::PageOut { guest, .. }
            | Step::ReadBack { guest, .. } => Some(guest),
        }
    }

    /// Bytes it is about.
    pub fn bytes(&self) -> u64 {
        match self {
            Step::Compress | Step::StopCompress => 0,
            Step::Balloon { from, to, .. } => from.abs_diff(*to),
            Step::PageOut { bytes, .. } | Step::ReadBack { bytes, .. } => *bytes,
        }
    }
}

/// Something to do, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// What.
    pub step: Step,
    /// Why, for people.
    pub why: String,
}

/// What is remembered of a guest.
#[derive(Clone, Debug, Default)]
struct Kept {
    /// What it was to have last.
    target: Option<u64>,
    took_at: Option<u64>,
    gave_at: Option<u64>,
    pages_at: Option<u64>,
    /// Nothing is taken from it before.
    rest_until: u64,
    /// How long the next rest is.
    rest_ms: u64,
    /// What it was seen to need when it was short: nothing is taken below, as long as the note is fresh.
    floor: Option<(u64, u64)>,
}

/// The rules, with what they remember.
#[derive(Clone, Debug, Default)]
pub struct Controller {
    gauge: Gauge,
    /// Nothing is compressed before: it was in vain.
    vain_until: u64,
    guests: BTreeMap<String, Kept>,
    /// When something was given back without need, and how long the next one waits.
    gave_at: Option<u64>,
    give_wait_ms: u64,
    /// Since when nothing helps, and why.
    stuck_since: Option<u64>,
    helpless: Option<String>,
}

/// What a guest's memory is worth: of two, the one with the lower price pays. A page that is not used counts `1 / (1 - tax)` times.
pub fn price(guest: &Guest) -> f64 {
    let has = guest.balloon.unwrap_or(guest.assigned).max(1);
    let used = (guest.active as f64 / has as f64).clamp(0.0, 1.0);
    let idle_costs = 1.0 / (1.0 - IDLE_TAX_PERCENT / 100.0);
    guest.share as f64 / (has as f64 * (used + idle_costs * (1.0 - used)))
}

fn due(at: Option<u64>, now: u64, every: u64) -> bool {
    at.is_none_or(|at| now.saturating_sub(at) >= every)
}

impl Kept {
    /// Below this nothing is taken.
    fn floor(&self, guest: &Guest, now: u64) -> u64 {
        let learnt = match self.floor {
            Some((bytes, until)) if now < until => bytes,
            _ => 0,
        };
        guest.minimum.max(learnt)
    }

    /// Bytes a balloon can take, step by step.
    fn spare(&self, guest: &Guest, now: u64) -> u64 {
        // A guest that does not say how it is might be hurt without a sign of it.
        let (Some(has), Some(inside)) = (guest.balloon, guest.inside) else {
            return 0;
        };
        if now < self.rest_until {
            return 0;
        }
        // While the balloon still moves, what the guest says is of the past.
        let moving = has.saturating_sub(self.target.unwrap_or(has));
        let spare = inside
            .available
            .saturating_sub(moving)
            .saturating_sub(2 * guest.reserve());
        let room = (has - moving).saturating_sub(self.floor(guest, now));
        room.min(spare) / PIECE * PIECE
    }

    /// Bytes of it that may be taken now.
    fn room(&self, guest: &Guest, now: u64) -> u64 {
        if !due(self.took_at, now, TAKE_EVERY_MS) {
            return 0;
        }
        let has = guest.balloon.unwrap_or(0);
        let has = has.min(self.target.unwrap_or(has));
        let most = (has / TAKE_PART).max(PIECE) / PIECE * PIECE;
        self.spare(guest, now).min(most)
    }
}

impl Controller {
    /// How short memory is.
    pub fn level(&self) -> Level {
        self.gauge.level()
    }

    /// Why nothing helps, if so.
    pub fn helpless(&self) -> Option<&str> {
        self.helpless.as_deref()
    }

    /// What to do now, in this order.
    pub fn decide(&mut self, seen: &Seen) -> Vec<Decision> {
        let mut seen = seen.clone();
        seen.guests.retain(|guest| !guest.exempt);
        let seen = &seen;
        let now = seen.at_ms;
        let level = self.gauge.look(seen);
        self.guests
            .retain(|name, _| seen.guests.iter().any(|g| g.name == *name));
        for guest in &seen.guests {
            self.guests.entry(guest.name.clone()).or_default();
        }
        let mut steps = Vec::new();
        self.help(seen, &mut steps);
        let helped: u64 = steps.iter().map(|d| d.step.bytes()).sum();
        let zswap = seen.zswap.as_ref();
        if let Some(zswap) = zswap.filter(|z| now >= self.vain_until && z.is_in_vain()) {
            self.vain_until = now + VAIN_MS;
            steps.push(Decision {
                step: Step::StopCompress,
                why: format!(
                    "compressed pages take {} and hold {}: they do not become smaller",
                    human(zswap.pool.unwrap_or(0)),
                    human(zswap.stored.unwrap_or(0))
                ),
            });
        }
        let presses = level >= Level::Soft;
        if presses {
            if self
                .gave_at
                .is_some_and(|at| now.saturating_sub(at) < BACKFIRE_MS)
            {
                self.give_wait_ms = (self.give_wait_ms.max(CALM_MS) * 2).min(REST_MAX_MS);
                self.gave_at = None;
            }
            self.take(seen, level, helped, &mut steps);
        } else {
            self.stuck_since = None;
            self.helpless = None;
            let wait = self.give_wait_ms.max(CALM_MS);
            if level == Level::High && self.gauge.for_ms(now) >= wait {
                self.give_back(seen, &mut steps);
            }
        }
        for decision in &steps {
            if let Step::Balloon { guest, to, .. } = &decision.step
                && let Some(kept) = self.guests.get_mut(guest)
            {
                kept.target = Some(*to);
            }
        }
        steps
    }

    /// Guests that are short themselves.
    fn help(&mut self, seen: &Seen, steps: &mut Vec<Decision>) {
        let now = seen.at_ms;
        for guest in &seen.guests {
            let (Some(has), Some(inside)) = (guest.balloon, guest.inside) else {
                continue;
            };
            let Some(kept) = self.guests.get_mut(&guest.name) else {
                continue;
            };
            let short = inside.available < guest.reserve();
            let reads = inside.swap_in > SHORT_SWAP_IN && inside.available < 4 * guest.reserve();
            if has >= guest.maximum || !(short || reads) {
                continue;
            }
            if !due(kept.gave_at, now, HELP_EVERY_MS) {
                continue;
            }
            let lacks = (3 * guest.reserve()).saturating_sub(inside.available);
            let gives = lacks.max(guest.assigned / 8);
            let from = has.max(kept.target.unwrap_or(0).min(guest.maximum));
            let to = from
                .saturating_add(gives.next_multiple_of(PIECE))
                .min(guest.maximum);
            kept.gave_at = Some(now);
            kept.rest_ms = (kept.rest_ms * 2).clamp(REST_MS, REST_MAX_MS);
            if now >= kept.rest_until {
                kept.rest_until = now + kept.rest_ms;
            }
            kept.floor = Some((
                guest.used().saturating_add(3 * guest.reserve()),
                now + 10 * REST_MS,
            ));
            if to <= has {
                continue;
            }
            steps.push(Decision {
                why: if short {
                    format!(
                        "the guest itself is short: {} are left to it, and {} should be",
                        human(inside.available),
                        human(guest.reserve())
                    )
                } else {
                    "the guest reads back from its own swap".to_owned()
                },
                step: Step::Balloon {
                    guest: guest.name.clone(),
                    from: has,
                    to,
                },
            });
        }
    }

    /// Memory is short.
    fn take(&mut self, seen: &Seen, level: Level, helped: u64, steps: &mut Vec<Decision>) {
        let now = seen.at_ms;
        let goal = wanted(seen.total).saturating_mul(2);
        // Where waiting says that it is short and the figures do not, a little more room is made.
        let least = if waits(seen) { seen.total / 64 } else { 0 };
        let lacks = goal
            .saturating_add(helped)
            .saturating_sub(seen.available)
            .max(least);
        if lacks == 0 {
            self.stuck_since = None;
            self.helpless = None;
            return;
        }
        let why = format!(
            "memory is {}: {} of {} are available, and {} should be",
            level.word(),
            human(seen.available),
            human(seen.total),
            human(goal)
        );
        let moving = self.moving(seen);
        let wants = lacks.saturating_sub(moving);
        let can = self.can_take(seen);
        let mut left = self.balloons(seen, wants, &why, steps);
        let mut done = steps.iter().any(|d| d.step.word() != "balloon-give") || moving > 0;
        // What balloons can take in later steps is left to them, unless next to nothing is left
        // until then.
        if level < Level::Low {
            left = left.saturating_sub(can.saturating_sub(wants - left));
        }
        if left > 0
            && now >= self.vain_until
            && let Some(step) = compress(seen, &why)
        {
            steps.push(step);
            done = true;
        }
        let resting = self
            .guests
            .values()
            .any(|k| !due(k.took_at, now, TAKE_EVERY_MS) || !due(k.pages_at, now, PAGES_EVERY_MS));
        if left > 0 && level >= Level::Hard {
            done |= self.page_out(seen, left, &why, steps);
        }
        if done || resting || level < Level::Hard {
            self.stuck_since = None;
            self.helpless = None;
            return;
        }
        let since = *self.stuck_since.get_or_insert(now);
        if now.saturating_sub(since) >= HELPLESS_MS {
            self.helpless = Some(format!("{why}; {}", reasons(seen)));
        }
    }

    /// Bytes that balloons were told to take and have not taken yet.
    fn moving(&self, seen: &Seen) -> u64 {
        let now = seen.at_ms;
        let each = seen.guests.iter().filter_map(|g| {
            let kept = self.guests.get(&g.name)?;
            // A guest that does not give after so long does not give.
            let fresh = !due(kept.took_at, now, 3 * TAKE_EVERY_MS);
            fresh.then(|| g.balloon?.checked_sub(kept.target?))?
        });
        each.sum()
    }

    /// Bytes that balloons can take, now and in later steps.
    fn can_take(&self, seen: &Seen) -> u64 {
        let each = seen.guests.iter().filter_map(|g| {
            let kept = self.guests.get(&g.name)?;
            Some(kept.spare(g, seen.at_ms))
        });
        each.sum()
    }

    /// Takes by balloons; what is still lacking.
    fn balloons(&mut self, seen: &Seen, lacks: u64, why: &str, steps: &mut Vec<Decision>) -> u64 {
        let now = seen.at_ms;
        let mut left = lacks;
        // Piece by piece from who is cheapest then: that is how it divides among several.
        let mut offers: Vec<(Guest, u64, u64)> = seen
            .guests
            .iter()
            .filter_map(|g| {
                let room = self.guests.get(&g.name)?.room(g, now);
                (room > 0).then(|| (g.clone(), room, 0))
            })
            .collect();
        while left > 0 {
            let cheapest = offers
                .iter_mut()
                .filter(|(_, room, taken)| taken < room)
                .min_by(|a, b| price(&a.0).total_cmp(&price(&b.0)));
            let Some((guest, _, taken)) = cheapest else {
                break;
            };
            *taken += PIECE;
            guest.balloon = guest.balloon.map(|has| has.saturating_sub(PIECE));
            left = left.saturating_sub(PIECE);
        }
        for (guest, _, taken) in offers.into_iter().filter(|(_, _, taken)| *taken > 0) {
            let Some(kept) = self.guests.get_mut(&guest.name) else {
                continue;
            };
            let from = guest.balloon.unwrap_or_default() + taken;
            let base = from.min(kept.target.unwrap_or(from));
            kept.took_at = Some(now);
            steps.push(Decision {
                step: Step::Balloon {
                    guest: guest.name.clone(),
                    from,
                    to: base.saturating_sub(taken),
                },
                why: format!(
                    "{why}; of what it has, the guest uses {} %",
                    guest.active * 100 / from.max(1)
                ),
            });
        }
        left
    }

    /// Swaps idle guests out, the cheapest first; true if that is going on.
    fn page_out(&mut self, seen: &Seen, lacks: u64, why: &str, steps: &mut Vec<Decision>) -> bool {
        let now = seen.at_ms;
        let mut room = (seen.swap_free.saturating_sub(seen.swap_total / 20)).min(lacks);
        let mut idle: Vec<&Guest> = seen
            .guests
            .iter()
            .filter(|g| g.pid.is_some() && g.idle() && g.resident > 2 * g.active + 8 * MIB)
            .collect();
        idle.sort_by(|a, b| price(a).total_cmp(&price(b)));
        let mut going = false;
        for guest in idle {
            let Some(kept) = self.guests.get_mut(&guest.name) else {
                continue;
            };
            let spare = guest.resident - guest.active;
            let bytes = (spare / 2)
                .min(guest.resident.saturating_sub(guest.reserved))
                .min(OUT_MAX)
                .min(room);
            if bytes < PIECE {
                continue;
            }
            going = true;
            if !due(kept.pages_at, now, PAGES_EVERY_MS) {
                continue;
            }
            kept.pages_at = Some(now);
            room -= bytes;
            steps.push(Decision {
                step: Step::PageOut {
                    guest: guest.name.clone(),
                    bytes,
                },
                why: format!(
                    "{why}; balloons give no more, and the guest is idle: it uses {} of {}",
                    human(guest.active),
                    human(guest.resident)
                ),
            });
        }
        going
    }

    /// There is plenty: what was taken goes back, as far as there stays plenty.
    fn give_back(&mut self, seen: &Seen, steps: &mut Vec<Decision>) {
        let now = seen.at_ms;
        if !due(self.gave_at, now, GIVE_EVERY_MS) {
            return;
        }
        // So much more than where it counts as plenty that giving back does not end that.
        let keeps = wanted(seen.total).saturating_mul(3);
        let mut room = seen.available.saturating_sub(keeps);
        let mut poorest: Vec<&Guest> = seen.guests.iter().collect();
        poorest.sort_by(|a, b| price(b).total_cmp(&price(a)));
        for guest in &poorest {
            let Some(has) = guest.balloon else { continue };
            let Some(kept) = self.guests.get_mut(&guest.name) else {
                continue;
            };
            let gives = (guest.assigned / GIVE_PART)
                .next_multiple_of(PIECE)
                .min(guest.maximum.saturating_sub(has));
            if gives == 0 || gives > room || !due(kept.gave_at, now, GIVE_EVERY_MS) {
                continue;
            }
            room -= gives;
            kept.gave_at = Some(now);
            self.gave_at = Some(now);
            steps.push(Decision {
                step: Step::Balloon {
                    guest: guest.name.clone(),
                    from: has,
                    to: has + gives,
                },
                why: format!(
                    "memory is plenty again: {} are available",
                    human(seen.available)
                ),
            });
        }
        for guest in &poorest {
            let Some(kept) = self.guests.get_mut(&guest.name) else {
                continue;
            };
            let bytes = guest.swapped.min(BACK_MAX).min(room);
            if guest.pid.is_none() || bytes < PIECE || !due(kept.pages_at, now, PAGES_EVERY_MS) {
                continue;
            }
            room -= bytes;
            kept.pages_at = Some(now);
            self.gave_at = Some(now);
            steps.push(Decision {
                step: Step::ReadBack {
                    guest: guest.name.clone(),
                    bytes,
                },
                why: format!(
                    "memory is plenty again, and {} of the guest are still swapped out",
                    human(guest.swapped)
                ),
            });
        }
    }
}

fn compress(seen: &Seen, why: &str) -> Option<Decision> {
    let off = seen.zswap.as_ref().is_some_and(|z| !z.on);
    (off && seen.swap_total > 0).then(|| Decision {
        step: Step::Compress,
        why: format!(
            "{why}; pages are compressed before they are swapped out, in up to {ZIP_MAX_PERCENT} % of memory"
        ),
    })
}

/// Why nothing helps.
fn reasons(seen: &Seen) -> String {
    let mut all = Vec::new();
    let with = seen.guests.iter().filter(|g| g.balloon.is_some()).count();
    let silent = seen
        .guests
        .iter()
        .filter(|g| g.balloon.is_some() && g.inside.is_none())
        .count();
    if seen.guests.is_empty() {
        all.push("no guest is known to take it from".to_owned());
    } else {
        all.push(format!(
            "{with} of {} guests have a balloon, and none can give more",
            seen.guests.len()
        ));
    }
    if silent > 0 {
        all.push(format!("{silent} do not say how they are"));
    }
    all.push(if seen.swap_total == 0 {
        "there is no swap".to_owned()
    } else {
        format!("{} of swap are free", human(seen.swap_free))
    });
    all.join(", ")
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
