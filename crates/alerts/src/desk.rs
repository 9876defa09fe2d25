//! What is told, and when.
//!
//! A thing that is wrong is one alert for as long as it lasts, however often it is seen. It begins when it was seen
//! for long enough, is told again once a day, and is over when it was not seen for long enough. An array that is being
//! rebuilt lacks a member as much as before: its alert is not over, and that it is being mended is told once. What happens
//! within some seconds comes in one message, and there are so many messages an hour: what is more waits for the next
//! one, so that a flood is few messages with everything in them. One source may cause half of them. What failed has messages of its own, for
//! each kind of thing: a client that makes a disk fail again and again keeps no one from being told that the daemon is dead. Each message
//! goes every way by itself, and is tried again until it has arrived.
//!
//! All that has to be remembered is in this one value. Whoever owns it writes it down before messages go
//! out and after they went: a crash in between sends a message twice, with the same number, and never not at
//! all. What became of messages is told to whoever keeps a record of that ([`Desk::outcomes`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use hearth_health::{Condition, Item, Kind, Reason, Report, mends};
use serde::{Deserialize, Serialize};

use crate::config::{AlertsConfig, Least};
use crate::message::{Entry, Message, News};

/// Milliseconds.
const SECOND: u64 = 1000;
/// Longest pause after a message did not go out; the first is a setting, and they double.
const RETRY_MAX_MS: u64 = 1800 * SECOND;
/// Longest that a daemon may hang before it is told.
const HANGING_SECONDS: u64 = 20;
/// Messages that wait for one way; of more, the oldest are given up, and the next says how many.
const WAITING_MAX: usize = 200;
/// Entries in one message; of more, the first are given and the rest counted.
const ENTRIES_MAX: usize = 200;
/// Entries that wait to be told.
const UNTOLD_MAX: usize = 2000;
/// Sources whose messages are counted.
const SOURCES_MAX: usize = 4096;
/// Alerts remembered after they are over, for whoever asks.
const PAST_MAX: usize = 100;

/// How long something must be seen before it is told.
fn settle_ms(config: &AlertsConfig, code: &str) -> u64 {
    let seconds = match code {
        // A restart, an upgrade.
        "daemon-down" => config.down_seconds,
        // That it hangs is known after seconds of silence only.
        "daemon-hanging" => config.down_seconds.min(HANGING_SECONDS),
        // A server that is restarted, a cable that is put in again.
        "origin-lost" | "disk-waiting" | "slow" | "slow-writes" | "flash-slow"
        | "flash-slow-writes" | "hot" => config.settle_seconds,
        _ => 0,
    };
    seconds.saturating_mul(SECOND)
}

/// Something that is wrong and was told, or is about to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alert {
    /// What sort of thing it is about.
    pub kind: Kind,
    /// What that is called.
    pub name: String,
    /// What is so, newest words.
    pub reason: Reason,
    /// Since when, in milliseconds since 1970.
    pub since: u64,
    /// When it was last seen.
    pub seen: u64,
    /// When it was last told; 0 before.
    pub told: u64,
    /// When it was over; 0 while it lasts.
    #[serde(default)]
    pub ended: u64,
    /// That it is on its way back, and how far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mending: Option<Mending>,
}

/// That something is on its way back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mending {
    /// How, newest words.
    pub what: String,
    /// When that was last seen.
    pub seen: u64,
}

/// Something that happened once and is to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Happened {
    /// The event's name.
    pub code: String,
    /// How bad.
    pub condition: Condition,
    /// What sort of thing it is about.
    pub kind: Kind,
    /// What that is called.
    pub name: String,
    /// What happened.
    pub what: String,
    /// When.
    pub at: u64,
}

/// A message on one way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delivery {
    /// The way, as [`AlertsConfig::ways`] names it.
    pub way: String,
    /// The message.
    pub message: Message,
    /// Attempts so far.
    pub attempts: u64,
    /// When it is tried next.
    pub next: u64,
    /// Why it did not go out, the last time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What became of what was to be told, for the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A message has arrived.
    Sent {
        /// The way it went.
        way: String,
        /// Its number.
        message: u64,
        /// Attempts that took.
        attempts: u64,
        /// Its first line.
        subject: String,
    },
    /// Messages will not arrive.
    GivenUp {
        /// The way they would have gone.
        way: String,
        /// How many.
        count: u64,
        /// Why.
        why: &'static str,
    },
    /// So many messages were written within the hour that what is to be told waits.
    HeldBack {
        /// Things that wait.
        count: u64,
        /// Messages an hour.
        most_per_hour: u64,
    },
}

/// All that is remembered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Desk {
    /// What is wrong now, by what it is about.
    open: BTreeMap<String, Alert>,
    /// What was, newest last.
    past: VecDeque<Alert>,
    /// What is to be told with the next message.
    untold: Vec<Entry>,
    /// Entries of `untold` that there was no room for.
    untold_more: u64,
    /// Since when `untold` is not empty.
    untold_since: u64,
    /// When messages were written within the last hour, by what caused them, see [`budgets`].
    caused: BTreeMap<String, Vec<u64>>,
    last_id: u64,
    /// What has not arrived yet.
    waiting: Vec<Delivery>,
    /// Messages given up, by way, since the last one that was not.
    given_up: BTreeMap<String, u64>,
    /// It was said that `untold` is held back.
    held: bool,
    /// What became of things, until somebody asks. A crash loses it, and never a message.
    #[serde(skip)]
    outcomes: Vec<Outcome>,
}

/// It does not work, and that is news.
fn has_failed(entry: &Entry) -> bool {
    entry.condition >= Condition::Failed && entry.news != News::Over
}

/// Messages an hour that an entry may cause: the budgets it draws on, each with its size.
fn budgets(config: &AlertsConfig, entry: &Entry) -> [(String, u64); 2] {
    let (kind, name) = (entry.kind.word(), &entry.name);
    let share = config.most_per_hour.div_ceil(2);
    match has_failed(entry) {
        true => [
            (format!("failed {kind}"), config.most_per_hour),
            (format!("failed {kind}/{name}"), share),
        ],
        false => [
            ("all".to_owned(), config.most_per_hour),
            (format!("{kind}/{name}"), share),
        ],
    }
}

/// Puts what matters most first, and of what matters as much the first of each kind before the second of any.
fn sort(entries: &mut Vec<Entry>) {
    let rank = |e: &Entry| {
        (
            e.news == News::Over,
            e.news == News::Lasts,
            std::cmp::Reverse(e.condition),
        )
    };
    let mut of_kind: BTreeMap<_, usize> = BTreeMap::new();
    let mut ranked: Vec<_> = std::mem::take(entries)
        .into_iter()
        .map(|e| {
            let nth = of_kind.entry((rank(&e), e.kind.word())).or_default();
            *nth += 1;
            ((rank(&e), *nth), e)
        })
        .collect();
    ranked.sort_by_key(|(rank, _)| *rank);
    entries.extend(ranked.into_iter().map(|(_, e)| e));
}

fn key(kind: Kind, name: &str, code: &str) -> String {
    format!("{}/{name}/{code}", kind.word())
}

impl Desk {
    /// Takes in what was judged. Of kinds in `unseen` nothing could be seen this time: what was wrong with them
    /// is neither over nor known to last.
    pub fn judge(&mut self, config: &AlertsConfig, now: u64, report: &Report, unseen: &[Kind]) {
        let least = match config.least {
            Least::Degraded => Condition::Degraded,
            Least::Failed => Condition::Failed,
        };
        for item in &report.items {
            for reason in item.reasons.iter().filter(|r| r.condition >= least) {
                let key = key(item.kind, &item.name, &reason.code);
                let alert = self.open.entry(key).or_insert_with(|| Alert {
                    kind: item.kind,
                    name: item.name.clone(),
                    reason: reason.clone(),
                    since: now,
                    seen: now,
                    told: 0,
                    ended: 0,
                    mending: None,
                });
                let worse = reason.condition > alert.reason.condition && alert.told > 0;
                alert.reason = reason.clone();
                alert.seen = now;
                if worse {
                    // As good as new.
                    alert.told = 0;
                }
            }
        }
        let mut news = Vec::new();
        let repeat = config.repeat_hours.saturating_mul(3600 * SECOND);
        let over = config.over_seconds.saturating_mul(SECOND);
        for item in &report.items {
            news.extend(self.mending(now, item));
        }
        for alert in self.open.values_mut() {
            if unseen.contains(&alert.kind) && alert.seen != now {
                alert.seen = alert.seen.max(now.saturating_sub(1));
                continue;
            }
            // It was on its way back and is not any more: as good as new, unless that is but a pause.
            if (alert.mending.as_ref()).is_some_and(|m| now.saturating_sub(m.seen) >= over)
                && alert.seen == now
            {
                alert.mending = None;
                alert.told = 0;
            }
            let told = alert.told;
            if alert.seen == now
                && told == 0
                && now.saturating_sub(alert.since) >= settle_ms(config, &alert.reason.code)
            {
                alert.told = now.max(1);
                news.push(alert.entry(News::Begun));
            } else if alert.seen == now && told > 0 && now.saturating_sub(told) >= repeat {
                alert.told = now;
                news.push(alert.entry(News::Lasts));
            } else if now.saturating_sub(alert.seen) >= over {
                alert.ended = now;
                if told > 0 {
                    news.push(alert.entry(News::Over));
                }
            }
        }
        // What was not there for long enough to be told leaves no trace as soon as it is gone.
        let gone = |alert: &Alert| {
            alert.ended > 0 || alert.told == 0 && alert.seen < now && !unseen.contains(&alert.kind)
        };
        let ended: Vec<String> = (self.open.iter())
            .filter(|(_, a)| gone(a))
            .map(|(k, _)| k.clone())
            .collect();
        for alert in ended
            .iter()
            .filter_map(|key| self.open.remove(key))
            .filter(|a| a.told > 0)
        {
            if self.past.len() >= PAST_MAX {
                self.past.pop_front();
            }
            self.past.push_back(alert);
        }
        news.into_iter().for_each(|entry| self.tell(now, entry));
    }

    /// Finds what of this is being mended: that it is, is news once.
    fn mending(&mut self, now: u64, item: &Item) -> Vec<Entry> {
        let mut news = Vec::new();
        let back = (item.reasons.iter()).filter(|r| r.condition == Condition::Rebuilding);
        for reason in back {
            for code in mends(&reason.code) {
                let alert = self.open.get_mut(&key(item.kind, &item.name, code));
                // One leg is brought back and another is out: that is no better than before.
                let Some(alert) = alert.filter(|alert| alert.seen != now) else {
                    continue;
                };
                alert.seen = now;
                let first = alert.mending.is_none();
                alert.mending = Some(Mending {
                    what: reason.what.clone(),
                    seen: now,
                });
                if first && alert.told > 0 {
                    news.push(alert.entry(News::Mends));
                }
            }
        }
        news
    }

    /// Takes in what happened.
    pub fn happened(&mut self, now: u64, event: Happened) {
        self.tell(
            now,
            Entry {
                news: News::Happened,
                condition: event.condition,
                kind: event.kind,
                name: event.name,
                code: event.code,
                what: event.what,
                remedy: String::new(),
                since: event.at,
            },
        );
    }

    fn tell(&mut self, now: u64, entry: Entry) {
        if self.untold.is_empty() {
            self.untold_since = now;
        }
        if self.untold.len() >= UNTOLD_MAX {
            self.untold_more += 1;
            // What failed has its place, also among others that failed: what of it comes last goes, in the order of messages.
            if !has_failed(&entry) {
                return;
            }
            self.untold.push(entry);
            sort(&mut self.untold);
            self.untold.truncate(UNTOLD_MAX);
            return;
        }
        self.untold.push(entry);
    }

    /// Entries that wait for the next message.
    pub fn untold(&self) -> u64 {
        self.untold.len() as u64 + self.untold_more
    }

    /// The budgets that the next message draws on; none if there may be no message.
    fn drawn(&self, config: &AlertsConfig) -> BTreeSet<String> {
        let spent = |budget: &String| self.caused.get(budget).map_or(0, |at| at.len() as u64);
        let mut drawn = BTreeSet::new();
        for entry in &self.untold {
            let budgets = budgets(config, entry);
            if budgets.iter().all(|(budget, most)| spent(budget) < *most) {
                drawn.extend(budgets.map(|(budget, _)| budget));
            }
        }
        drawn
    }

    /// Writes a message if there is something to tell and it is time to; true if it did.
    pub fn write(&mut self, config: &AlertsConfig, now: u64, host: &str) -> bool {
        self.caused.retain(|_, written| {
            written.retain(|at| now.saturating_sub(*at) < 3600 * SECOND);
            !written.is_empty()
        });
        let gathered =
            now.saturating_sub(self.untold_since) >= config.gather_seconds.saturating_mul(SECOND);
        if self.untold.is_empty() || !gathered {
            return false;
        }
        let drawn = self.drawn(config);
        if drawn.is_empty() {
            // Once for all that waits: how much it is grows, and is told with it.
            if !std::mem::replace(&mut self.held, true) {
                self.outcomes.push(Outcome::HeldBack {
                    count: self.untold(),
                    most_per_hour: config.most_per_hour,
                });
            }
            return false;
        }
        self.held = false;
        for budget in drawn {
            if self.caused.len() < SOURCES_MAX || self.caused.contains_key(&budget) {
                self.caused.entry(budget).or_default().push(now);
            }
        }
        let mut entries = std::mem::take(&mut self.untold);
        sort(&mut entries);
        let more = std::mem::take(&mut self.untold_more)
            + entries.len().saturating_sub(ENTRIES_MAX) as u64;
        entries.truncate(ENTRIES_MAX);
        if more > 0 {
            let last = entries.last().map_or(now, |e| e.since);
            entries.push(Entry {
                news: News::Happened,
                condition: Condition::Degraded,
                kind: Kind::Host,
                name: host.to_owned(),
                code: "more".to_owned(),
                what: format!("{more} more things, for which there is no room here"),
                remedy: String::new(),
                since: last,
            });
        }
        self.send(config, now, host, entries);
        true
    }

    /// Writes a message that tries every way at once.
    pub fn test(&mut self, config: &AlertsConfig, now: u64, host: &str) -> u64 {
        let entry = Entry {
            news: News::Test,
            condition: Condition::Healthy,
            kind: Kind::Host,
            name: host.to_owned(),
            code: "test".to_owned(),
            what: "somebody tries whether alerts arrive; nothing is wrong".to_owned(),
            remedy: String::new(),
            since: now,
        };
        self.send(config, now, host, vec![entry]);
        self.last_id
    }

    fn send(&mut self, config: &AlertsConfig, now: u64, host: &str, entries: Vec<Entry>) {
        self.last_id += 1;
        for way in config.ways() {
            let mut count = 0;
            while self.waiting.iter().filter(|d| d.way == way).count() >= WAITING_MAX {
                if let Some(at) = self.waiting.iter().position(|d| d.way == way) {
                    self.waiting.remove(at);
                    count += 1;
                }
            }
            if count > 0 {
                *self.given_up.entry(way.clone()).or_default() += count;
                self.outcomes.push(Outcome::GivenUp {
                    way: way.clone(),
                    count,
                    why: "too many wait for it",
                });
            }
            self.waiting.push(Delivery {
                message: Message {
                    id: self.last_id,
                    at: now,
                    host: host.to_owned(),
                    entries: entries.clone(),
                    lost_before: self.given_up.remove(&way).unwrap_or(0),
                },
                way,
                attempts: 0,
                next: now,
                error: None,
            });
        }
    }

    /// The next message that is to go out on each way. On a way they go in order: the first that does not arrive
    /// holds up those behind it.
    pub fn due(&self, now: u64) -> Vec<Delivery> {
        let mut first: BTreeMap<&str, &Delivery> = BTreeMap::new();
        for delivery in &self.waiting {
            first.entry(&delivery.way).or_insert(delivery);
        }
        first
            .into_values()
            .filter(|d| d.next <= now)
            .cloned()
            .collect()
    }

    /// A message went out, or did not and why.
    pub fn attempted(
        &mut self,
        config: &AlertsConfig,
        now: u64,
        way: &str,
        id: u64,
        outcome: Result<(), String>,
    ) {
        let at = self
            .waiting
            .iter()
            .position(|d| d.way == way && d.message.id == id);
        let Some(at) = at else { return };
        match outcome {
            Ok(()) => {
                let delivery = self.waiting.remove(at);
                self.outcomes.push(Outcome::Sent {
                    way: delivery.way,
                    message: id,
                    attempts: delivery.attempts + 1,
                    subject: delivery.message.subject(),
                });
            }
            Err(error) => {
                let delivery = &mut self.waiting[at];
                let pause = (config.retry_seconds.saturating_mul(SECOND))
                    .saturating_mul(1 << delivery.attempts.min(16))
                    .min(RETRY_MAX_MS);
                delivery.attempts += 1;
                delivery.next = now.saturating_add(pause);
                delivery.error = Some(error);
            }
        }
    }

    /// Forgets what waits for ways that are no longer there.
    pub fn ways_are(&mut self, config: &AlertsConfig) {
        let ways = config.ways();
        let mut gone: BTreeMap<String, u64> = BTreeMap::new();
        for delivery in self.waiting.extract_if(.., |d| !ways.contains(&d.way)) {
            *gone.entry(delivery.way).or_default() += 1;
        }
        let why = "it is configured no longer";
        let gone = gone.into_iter();
        self.outcomes
            .extend(gone.map(|(way, count)| Outcome::GivenUp { way, count, why }));
        self.given_up.retain(|way, _| ways.contains(way));
    }

    /// What became of things since this was asked last.
    pub fn outcomes(&mut self) -> Vec<Outcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// True if one does as well as the other to go on from: they differ in when things were last seen alone.
    pub fn is_as_good_as(&self, other: &Desk) -> bool {
        let still = |desk: &Desk| {
            let mut desk = desk.clone();
            desk.outcomes.clear();
            for alert in desk.open.values_mut() {
                alert.seen = 0;
                if let Some(mending) = &mut alert.mending {
                    mending.what.clear();
                    mending.seen = 0;
                }
            }
            desk
        };
        still(self) == still(other)
    }

    /// What is wrong now, the oldest first.
    pub fn open(&self) -> Vec<Alert> {
        let mut open: Vec<Alert> = self.open.values().filter(|a| a.told > 0).cloned().collect();
        open.sort_by_key(|a| a.since);
        open
    }

    /// What was, newest last.
    pub fn past(&self) -> Vec<Alert> {
        self.past.iter().cloned().collect()
    }

    /// What has not arrived yet.
    pub fn waiting(&self) -> &[Delivery] {
        &self.waiting
    }
}

impl Alert {
    fn entry(&self, news: News) -> Entry {
        let now = self
            .mending
            .as_ref()
            .filter(|m| m.seen == self.seen && news != News::Over);
        let (condition, what, remedy) = match now {
            Some(mending) => (Condition::Rebuilding, &mending.what, ""),
            None => {
                let reason = &self.reason;
                (reason.condition, &reason.what, reason.remedy.as_str())
            }
        };
        Entry {
            news,
            condition,
            kind: self.kind,
            name: self.name.clone(),
            code: self.reason.code.clone(),
            what: what.clone(),
            remedy: remedy.to_owned(),
            since: self.since,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60 * SECOND;
    const DAY: u64 = 24 * 60 * MINUTE;
    /// Some time of day.
    const T0: u64 = 1_700_000_000_000;

    fn config() -> AlertsConfig {
        let mail = "[mail]\nto = ['a@example.org', 'b@example.org']";
        toml::from_str(mail).unwrap()
    }

    fn report(reasons: &[(&str, Reason)]) -> Report {
        let items = reasons
            .iter()
            .map(|(name, r)| Item::new(Kind::Device, *name, vec![r.clone()]));
        Report::new(0, items.collect(), Vec::new())
    }

    fn bad(code: &str) -> Reason {
        Reason::degraded(code, format!("{code}!"), "mend it")
    }

    /// A desk and what it has told, in words.
    struct Told {
        desk: Desk,
        config: AlertsConfig,
        said: Vec<Vec<(News, String)>>,
        outcomes: Vec<Outcome>,
    }

    impl Told {
        fn new() -> Told {
            Told {
                desk: Desk::default(),
                config: config(),
                said: Vec::new(),
                outcomes: Vec::new(),
            }
        }

        fn look(&mut self, now: u64, report: &Report, unseen: &[Kind]) {
            // Over every restart.
            let kept = serde_json::to_vec(&self.desk).unwrap();
            self.desk = serde_json::from_slice(&kept).unwrap();
            self.desk.judge(&self.config, now, report, unseen);
            self.desk.write(&self.config, now, "h");
            let due = self.desk.due(now);
            for d in &due {
                self.desk
                    .attempted(&self.config, now, &d.way, d.message.id, Ok(()));
            }
            self.outcomes.extend(self.desk.outcomes());
            if let Some(d) = due.first() {
                assert_eq!(due.len(), 2, "both are told");
                let words = d.message.entries.iter().map(|e| (e.news, e.name.clone()));
                self.said.push(words.collect());
            }
        }

        /// Looks every ten seconds.
        fn during(&mut self, from: u64, to: u64, report: &Report) {
            for now in (from..to).step_by(10_000) {
                self.look(now, report, &[]);
            }
        }
    }

    #[test]
    fn what_begins_together_is_one_message_what_lasts_is_daily_and_the_end_is_told() {
        let mut told = Told::new();
        let two = report(&[("a", bad("x")), ("b", bad("x"))]);
        told.during(T0, T0 + 2 * DAY + MINUTE, &two);
        let both = |news| vec![(news, "a".to_owned()), (news, "b".to_owned())];
        assert_eq!(
            told.said,
            [both(News::Begun), both(News::Lasts), both(News::Lasts)]
        );
        told.said.clear();
        let one = report(&[("a", bad("x"))]);
        told.during(T0 + 2 * DAY + MINUTE, T0 + 2 * DAY + 10 * MINUTE, &one);
        assert_eq!(told.said, [[(News::Over, "b".to_owned())]]);
        assert_eq!(told.desk.open().len(), 1);
        assert_eq!(told.desk.past().len(), 1);
    }

    #[test]
    fn what_is_being_rebuilt_is_told_and_not_over_until_it_is_whole() {
        let mut told = Told::new();
        let out = report(&[("md0", bad("array-degraded"))]);
        let back = |percent| {
            let what = format!("rebuilt, {percent} % done");
            report(&[("md0", Reason::rebuilding("array-rebuilding", what))])
        };
        told.during(T0, T0 + 5 * MINUTE, &out);
        // Half a day of it, with a pause in which the kernel waits for something.
        told.during(T0 + 5 * MINUTE, T0 + 60 * MINUTE, &back(1));
        told.during(T0 + 60 * MINUTE, T0 + 61 * MINUTE, &out);
        told.during(T0 + 61 * MINUTE, T0 + DAY / 2, &back(60));
        let one = |news| vec![(news, "md0".to_owned())];
        assert_eq!(told.said, [one(News::Begun), one(News::Mends)]);
        let open = told.desk.open();
        assert_eq!(open[0].reason.code, "array-degraded");
        assert_eq!(open[0].mending.as_ref().unwrap().what, "rebuilt, 60 % done");
        // It breaks off and stays so, which is news; then it gets there.
        told.during(T0 + DAY / 2, T0 + DAY / 2 + 5 * MINUTE, &out);
        let at = T0 + DAY / 2 + 5 * MINUTE;
        told.during(at, at + 5 * MINUTE, &back(70));
        told.during(at + 5 * MINUTE, at + 10 * MINUTE, &report(&[]));
        let rest = [one(News::Begun), one(News::Mends), one(News::Over)];
        assert_eq!(told.said[2..], rest);
        assert!(told.desk.open().is_empty());
    }

    #[test]
    fn what_lasts_while_it_is_mended_says_how_far_it_is() {
        let mut told = Told::new();
        told.during(T0, T0 + MINUTE, &report(&[("md0", bad("array-degraded"))]));
        let back = Reason::rebuilding("array-rebuilding", "half done");
        told.during(T0 + MINUTE, T0 + DAY + MINUTE, &report(&[("md0", back)]));
        let last = told.said.last().unwrap();
        assert_eq!(last[0].0, News::Lasts);
        let mut alert = told.desk.open()[0].clone();
        let entry = alert.entry(News::Lasts);
        assert_eq!(
            (entry.condition, entry.what.as_str()),
            (Condition::Rebuilding, "half done")
        );
        assert_eq!(entry.remedy, "");
        // How far it is changes all the time, and is no reason to write the file.
        let mut other = told.desk.clone();
        alert.mending = Some(Mending {
            what: "more".to_owned(),
            seen: 1,
        });
        let key = other.open.keys().next().unwrap().clone();
        other.open.insert(key.clone(), alert.clone());
        assert!(told.desk.is_as_good_as(&other));
        alert.mending = None;
        other.open.insert(key, alert);
        assert!(!told.desk.is_as_good_as(&other));
    }

    #[test]
    fn a_leg_that_comes_back_mends_nothing_while_another_is_out() {
        let mut told = Told::new();
        let both = |reasons: Vec<Reason>| {
            Report::new(0, vec![Item::new(Kind::Disk, "vm", reasons)], Vec::new())
        };
        let back = Reason::rebuilding("leg-resyncing", "half done");
        told.during(T0, T0 + 5 * MINUTE, &both(vec![bad("leg-out")]));
        told.during(
            T0 + 5 * MINUTE,
            T0 + 10 * MINUTE,
            &both(vec![bad("leg-out"), back]),
        );
        assert_eq!(told.said.len(), 1, "{:?}", told.said);
        assert_eq!(told.desk.open()[0].mending, None);
    }

    #[test]
    fn what_comes_and_goes_is_one_alert() {
        let mut told = Told::new();
        let there = report(&[("a", bad("x"))]);
        let none = report(&[]);
        for n in 0..100 {
            let at = T0 + n * MINUTE;
            told.during(at, at + MINUTE / 2, &there);
            told.during(at + MINUTE / 2, at + MINUTE, &none);
        }
        assert_eq!(told.said.len(), 1, "{:?}", told.said);
    }

    #[test]
    fn a_restart_of_the_daemon_is_no_alert_and_a_daemon_that_stays_away_is() {
        let down = Item::new(
            Kind::Daemon,
            "hearth",
            vec![Reason::failed("daemon-down", "gone", "")],
        );
        let down = Report::new(0, vec![down], Vec::new());
        let mut told = Told::new();
        told.during(T0, T0 + 40 * SECOND, &down);
        told.during(T0 + 40 * SECOND, T0 + 5 * MINUTE, &report(&[]));
        assert_eq!(told.said, Vec::<Vec<_>>::new());
        told.during(T0 + 5 * MINUTE, T0 + 8 * MINUTE, &down);
        assert_eq!(told.said, [[(News::Begun, "hearth".to_owned())]]);
    }

    #[test]
    fn times_are_those_of_the_settings() {
        let down = Reason::failed("daemon-down", "gone", "");
        let down = Report::new(
            0,
            vec![Item::new(Kind::Daemon, "hearth", vec![down])],
            Vec::new(),
        );
        let mut told = Told::new();
        told.config.gather_seconds = 0;
        (told.config.down_seconds, told.config.over_seconds) = (120, 600);
        told.during(T0, T0 + 2 * MINUTE, &down);
        assert_eq!(told.said.len(), 0, "it may be away for two minutes");
        told.during(T0 + 2 * MINUTE, T0 + 3 * MINUTE, &down);
        assert_eq!(told.said.len(), 1);
        told.during(T0 + 3 * MINUTE, T0 + 12 * MINUTE, &report(&[]));
        assert_eq!(told.said.len(), 1, "it may come back for ten");
        told.during(T0 + 12 * MINUTE, T0 + 14 * MINUTE, &report(&[]));
        assert_eq!(told.said[1], [(News::Over, "hearth".to_owned())]);

        told.config.retry_seconds = 7;
        told.desk.test(&told.config, T0, "h");
        let first = told.desk.due(T0)[0].clone();
        for (now, next) in [(T0, 7), (T0 + 7 * SECOND, 14)] {
            let outcome = Err("away".to_owned());
            let (way, id) = (&first.way, first.message.id);
            (told.desk).attempted(&told.config, now, way, id, outcome);
            let waits = told.desk.waiting().iter().find(|d| d.way == *way);
            assert_eq!(waits.unwrap().next, now + next * SECOND);
        }
    }

    #[test]
    fn what_cannot_be_seen_is_not_over() {
        let mut told = Told::new();
        let there = report(&[("a", bad("x"))]);
        told.during(T0, T0 + 5 * MINUTE, &there);
        for now in (T0 + 5 * MINUTE..T0 + 60 * MINUTE).step_by(10_000) {
            told.look(now, &report(&[]), &[Kind::Device]);
        }
        assert_eq!(told.said.len(), 1);
        told.during(T0 + 60 * MINUTE, T0 + 70 * MINUTE, &report(&[]));
        assert_eq!(told.said[1], [(News::Over, "a".to_owned())]);
    }

    #[test]
    fn what_gets_worse_is_told_again() {
        let mut told = Told::new();
        told.during(T0, T0 + 5 * MINUTE, &report(&[("a", bad("x"))]));
        let worse = Reason::failed("x", "dead", "");
        told.during(T0 + 5 * MINUTE, T0 + 10 * MINUTE, &report(&[("a", worse)]));
        assert_eq!(told.said.len(), 2);
    }

    #[test]
    fn a_flood_is_few_messages_with_everything_in_them() {
        let mut told = Told::new();
        for n in 0..500u64 {
            let now = T0 + n * 10 * SECOND;
            told.desk.happened(
                now,
                Happened {
                    code: "daemon-started-after-crash".to_owned(),
                    condition: Condition::Degraded,
                    kind: Kind::Daemon,
                    name: n.to_string(),
                    what: "again".to_owned(),
                    at: now,
                },
            );
            told.look(now, &report(&[]), &[]);
        }
        // An hour's worth at once, and the same in the next.
        let messages = told.said.len() as u64;
        assert!((12..=24).contains(&messages), "{messages}");
        told.during(T0 + 2 * DAY, T0 + 2 * DAY + MINUTE, &report(&[]));
        assert!(told.desk.untold.is_empty());
        // That it was held back is for the record, once until the next message.
        let held = |o: &&Outcome| matches!(o, Outcome::HeldBack { .. });
        let held: Vec<&Outcome> = told.outcomes.iter().filter(held).collect();
        assert!((1..=messages as usize).contains(&held.len()), "{held:?}");
        assert!(
            matches!(held[0], Outcome::HeldBack { count, most_per_hour: 12 } if *count > 0),
            "{held:?}"
        );
    }

    fn event(n: u64, kind: Kind, name: &str, condition: Condition) -> Happened {
        Happened {
            code: format!("x{n}"),
            condition,
            kind,
            name: name.to_owned(),
            what: "again".to_owned(),
            at: T0,
        }
    }

    /// Events that clients cause use up neither the messages nor the places of other events.
    #[test]
    fn dead_daemon_is_told_in_a_flood() {
        let mut told = Told::new();
        for n in 0..2400u64 {
            let now = T0 + n * 1125;
            let condition = match n % 2 {
                0 => Condition::Degraded,
                _ => Condition::Failed,
            };
            let name = format!("vms{n}");
            told.desk
                .happened(now, event(n, Kind::Datastore, &name, condition));
            if n % 8 == 0 {
                told.look(now, &report(&[]), &[]);
            }
        }
        let now = T0 + 45 * MINUTE;
        told.during(now - MINUTE, now, &report(&[]));
        let before = told.said.len();
        assert!(told.desk.untold() > 1000 && before <= 24, "{before}");
        let dead = event(0, Kind::Daemon, "hearth", Condition::Failed);
        told.desk.happened(now, dead);
        told.during(now, now + MINUTE, &report(&[]));
        assert_eq!(told.said.len(), before + 1);
        let first = told.said[before].iter().take(2);
        assert!(first.into_iter().any(|(_, name)| name == "hearth"));
    }

    #[test]
    fn one_source_causes_half_of_the_messages() {
        let mut told = Told::new();
        for n in 0..30 {
            let now = T0 + n * MINUTE;
            let own = event(n, Kind::Datastore, "vms", Condition::Degraded);
            told.desk.happened(now, own);
            told.during(now, now + MINUTE, &report(&[]));
        }
        assert_eq!(told.said.len(), 6);
        let other = event(0, Kind::Disk, "vm1", Condition::Degraded);
        told.desk.happened(T0 + 30 * MINUTE, other);
        told.during(T0 + 30 * MINUTE, T0 + 31 * MINUTE, &report(&[]));
        assert_eq!(told.said.len(), 7);
        assert!(told.desk.untold.is_empty(), "all go with it");
    }

    #[test]
    fn what_became_of_a_message_is_for_the_record() {
        let mut desk = Desk::default();
        let config = config();
        let id = desk.test(&config, T0, "h");
        let ways = config.ways();
        assert_eq!(desk.outcomes(), []);
        let away = Err("away".to_owned());
        desk.attempted(&config, T0, &ways[0], id, away);
        assert_eq!(desk.outcomes(), [], "it is tried again");
        desk.attempted(&config, T0 + MINUTE, &ways[0], id, Ok(()));
        let subject = desk.waiting()[0].message.subject();
        let sent = Outcome::Sent {
            way: ways[0].clone(),
            message: id,
            attempts: 2,
            subject,
        };
        assert_eq!(desk.outcomes(), [sent]);
        assert_eq!(desk.outcomes(), [], "each once");
        // The other way is no longer there, with one message on it.
        let fewer: AlertsConfig = toml::from_str("[mail]\nto = ['a@example.org']").unwrap();
        desk.ways_are(&fewer);
        let given_up = Outcome::GivenUp {
            way: ways[1].clone(),
            count: 1,
            why: "it is configured no longer",
        };
        assert_eq!(desk.outcomes(), [given_up]);
    }

    #[test]
    fn a_server_that_is_away_loses_nothing_and_is_not_hammered() {
        let mut desk = Desk::default();
        let config = config();
        desk.judge(&config, T0, &report(&[("a", bad("x"))]), &[]);
        assert!(!desk.write(&config, T0, "h"), "it is gathered first");
        assert!(desk.write(&config, T0 + MINUTE, "h"));
        let mut attempts = 0;
        for now in (T0 + MINUTE..T0 + DAY).step_by(1000) {
            for d in desk.due(now) {
                attempts += 1;
                // Only one of the two recipients' servers takes it.
                let outcome = if d.way.contains("b@") {
                    Ok(())
                } else {
                    Err("away".to_owned())
                };
                desk.attempted(&config, now, &d.way, d.message.id, outcome);
            }
        }
        assert!((40..80).contains(&attempts), "{attempts}");
        let kept = serde_json::to_vec(&desk).unwrap();
        let mut desk: Desk = serde_json::from_slice(&kept).unwrap();
        assert_eq!(desk.waiting().len(), 1);
        assert_eq!(desk.waiting()[0].error.as_deref(), Some("away"));
        let due = desk.due(T0 + 2 * DAY);
        assert_eq!(due[0].way, "mail:a@example.org");
        desk.attempted(
            &config,
            T0 + 2 * DAY,
            &due[0].way,
            due[0].message.id,
            Ok(()),
        );
        assert!(desk.waiting().is_empty());
    }

    #[test]
    fn what_waits_is_bounded_and_the_loss_is_told() {
        let mut desk = Desk::default();
        let config = config();
        for n in 0..500 {
            desk.test(&config, T0 + n, "h");
        }
        assert_eq!(desk.waiting().len(), 2 * WAITING_MAX);
        let lost: u64 = (desk.waiting().iter()).map(|d| d.message.lost_before).sum();
        assert!(lost > 0);
        let given_up = desk.outcomes().into_iter().map(|o| match o {
            Outcome::GivenUp { count, .. } => count,
            other => panic!("{other:?}"),
        });
        assert_eq!(given_up.sum::<u64>(), 2 * (500 - WAITING_MAX as u64));
        let fewer: AlertsConfig = toml::from_str("[mail]\nto = ['a@example.org']").unwrap();
        desk.ways_are(&fewer);
        assert_eq!(desk.waiting().len(), WAITING_MAX);
    }
}
