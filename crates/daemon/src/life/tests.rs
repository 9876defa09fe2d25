//! Single steps, and any steps in any order.

use super::*;
use proptest::prelude::*;

fn error(what: &str) -> Error {
    Error::unavailable(what, "")
}

fn waiting() -> Unserved {
    Unserved::Waiting(error("not there"))
}

/// The life after these events, all of which can happen, and the last one's effects.
fn after(life: Life, events: &[Event]) -> (Life, Vec<Effect>) {
    let mut now = (life, Vec::new());
    for event in events {
        now = now.0.on(event.clone()).unwrap();
    }
    now
}

fn served() -> Life {
    let events = [
        Event::Open,
        Event::Opened,
        Event::Taken { reconcile: false },
    ];
    let (life, effects) = after(Life::Unserved(waiting()), &events);
    assert_eq!(effects, [Effect::Offer]);
    life
}

#[test]
fn an_attempt_that_ends_without_a_word_leaves_all_as_it_was() {
    let before = Life::Unserved(waiting());
    for events in [&[Event::Open][..], &[Event::Open, Event::Opened]] {
        let (life, _) = after(before.clone(), events);
        let (life, effects) = life.on(Event::Abandoned).unwrap();
        assert_eq!(life, before);
        assert_eq!(effects, [Effect::Close { wait: false }]);
    }
    let (life, effects) = Life::Arriving.on(Event::Abandoned).unwrap();
    assert_eq!((life, effects), (Life::Gone, vec![Effect::Retire]));
}

#[test]
fn nobody_reads_before_what_is_dirty_has_won() {
    let events = [Event::Open, Event::Opened, Event::Taken { reconcile: true }];
    let (life, effects) = after(Life::Unserved(waiting()), &events);
    assert_eq!(effects, [Effect::Drain(true)]);
    assert_eq!(life.on(Event::Flush), Err(Refusal::Reconciling));
    let remove = Event::Remove { discard: true };
    assert_eq!(life.on(remove), Err(Refusal::Reconciling));
    let (life, effects) = after(life, &[Event::Drained]);
    assert_eq!(effects, [Effect::Settle]);
    let (life, effects) = after(life, &[Event::Settled]);
    assert_eq!(effects, [Effect::Drain(false), Effect::Offer]);
    assert_eq!(life, served());
}

#[test]
fn a_removal_closes_then_erases_then_gives_up() {
    let remove = Event::Remove { discard: false };
    let (life, effects) = after(served(), &[remove]);
    assert_eq!(effects, [Effect::Drain(true), Effect::Withdraw]);
    let (life, effects) = after(life, &[Event::Drained]);
    assert_eq!(effects, [Effect::Shut(true)]);
    let (life, effects) = after(life, &[Event::AtRest, Event::Busy, Event::AtRest]);
    assert_eq!(effects, [Effect::Detach]);
    let (life, effects) = after(life, &[Event::Detached { owed: false }]);
    assert_eq!(effects.last(), Some(&Effect::Close { wait: true }));
    assert_eq!(life.on(Event::Cancel), Err(Refusal::Leaving));
    let (life, effects) = after(life, &[Event::Closed]);
    assert_eq!(effects, [Effect::Erase]);
    let (erased, effects) = after(life.clone(), &[Event::Erased]);
    assert!(
        erased.is_known(),
        "who is told that it is gone may add it elsewhere"
    );
    assert_eq!(effects, [Effect::GiveUp]);
    let (gone, effects) = after(erased, &[Event::GivenUp]);
    assert_eq!((gone, effects), (Life::Gone, vec![Effect::Retire]));
    // A registry that cannot be written keeps the disk.
    let (life, _) = after(life, &[Event::NotErased(error("flash"))]);
    assert!(life.is_awaited() && life.is_known());
}

#[test]
fn a_write_at_the_last_moment_keeps_the_disk() {
    for (discard, stays) in [(false, true), (true, false)] {
        let events = [
            Event::Remove { discard },
            Event::Drained,
            Event::AtRest,
            Event::Detached { owed: true },
        ];
        let (life, effects) = after(served(), &events);
        assert_eq!(life == served(), stays);
        assert_eq!(effects.contains(&Effect::Reattach), stays);
        assert_eq!(effects.contains(&Effect::Close { wait: true }), !stays);
    }
}

#[test]
fn a_removal_of_what_is_not_served_goes_back_to_why_it_was_not() {
    let before = Life::Unserved(waiting());
    let events = [Event::Remove { discard: true }, Event::Drained];
    let (life, effects) = after(before.clone(), &events);
    assert_eq!(effects, []);
    assert!(!life.is_awaited(), "it would be served while it is erased");
    let (life, effects) = after(life, &[Event::Cancel]);
    assert_eq!((life, effects), (before, Vec::new()));
}

#[test]
fn what_is_anothers_is_let_go_whatever_went_on() {
    let remove = Event::Remove { discard: false };
    for life in [
        served(),
        after(served(), &[Event::Flush]).0,
        after(served(), &[remove]).0,
    ] {
        let (life, effects) = after(life, &[Event::Fence(error("taken over"))]);
        assert_eq!(effects.last(), Some(&Effect::Detach));
        let (life, effects) = after(life, &[Event::Busy, Event::Detached { owed: true }]);
        assert!(matches!(
            life,
            Life::Unserved(Unserved::Refused { watched: false, .. })
        ));
        // Its owner's record is not ours to erase.
        assert!(!effects.contains(&Effect::GiveUp));
    }
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        Just(Event::Open),
        Just(Event::Opened),
        any::<bool>().prop_map(|reconcile| Event::Taken { reconcile }),
        Just(Event::NotTaken(waiting())),
        Just(Event::Abandoned),
        Just(Event::Flush),
        any::<bool>().prop_map(|discard| Event::Remove { discard }),
        Just(Event::Cancel),
        Just(Event::Failed(error("x"))),
        Just(Event::Drained),
        Just(Event::Settled),
        Just(Event::AtRest),
        any::<bool>().prop_map(|owed| Event::Detached { owed }),
        Just(Event::Busy),
        Just(Event::Closed),
        Just(Event::Erased),
        Just(Event::GivenUp),
        Just(Event::NotErased(error("y"))),
        Just(Event::Fence(error("z"))),
    ]
}

proptest! {
    /// Also events that make no sense do no harm.
    #[test]
    fn any_events_in_any_order(events in proptest::collection::vec(event(), 0..60)) {
        let mut life = Life::Unserved(waiting());
        for event in events {
            let before = life.clone();
            let Ok((next, effects)) = life.on(event.clone()) else {
                continue;
            };
            let has = |effect: &Effect| effects.contains(effect);
            if has(&Effect::Offer) {
                prop_assert!(next.is_served(), "{before:?} {event:?}");
            }
            if has(&Effect::Erase) {
                prop_assert_eq!(&before, &Life::Leaving);
            }
            if has(&Effect::GiveUp) {
                prop_assert_eq!(&event, &Event::Erased);
            }
            if has(&Effect::Close { wait: true }) || has(&Effect::Close { wait: false }) {
                prop_assert!(!next.is_served(), "{before:?} {event:?}");
            }
            if before == Life::Leaving {
                let end = matches!(next, Life::Leaving | Life::Gone | Life::Unserved(_));
                prop_assert!(end, "{event:?}");
            }
            // Nobody would look after what goes on without ending.
            if next.is_removed() {
                prop_assert!(next.is_busy());
            }
            if before == Life::Gone {
                prop_assert_eq!(&next, &Life::Gone);
            }
            life = next;
        }
    }
}
