/* Tasks for the threads of PyTorch's OpenMP runtime.

   `GOMP_parallel` is the function that gcc calls for a parallel region; LLVM's runtime has it too. Calling it by name
   gives this code, whatever compiler made it, the threads that PyTorch has started already. If the process has no such
   function, one thread does all tasks. The runtime may start fewer threads than asked for, for example inside another
   parallel region. */

#ifndef DYNATTN_THREADS_H
#define DYNATTN_THREADS_H

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));

/* Does task `index`; `thread` numbers the threads that take part, from 0. */
typedef void (*task_function)(const void *context, long index, long thread);

typedef struct {
    task_function function;
    const void *context;
    long count, next_index, next_thread;
} task_list;

static void work_on_tasks(void *list) {
    task_list *tasks = list;
    long index, thread = __atomic_fetch_add(&tasks->next_thread, 1, __ATOMIC_RELAXED);
    while ((index = __atomic_fetch_add(&tasks->next_index, 1, __ATOMIC_RELAXED)) < tasks->count)
        tasks->function(tasks->context, index, thread);
}

/* Does tasks 0 to `count` - 1. They begin in this order, each on the next thread that is free. */
static void for_each_task(task_function function, const void *context, long count, long threads) {
    task_list tasks = {function, context, count, 0, 0};
    if (threads > count) threads = count;
    if (threads > 1 && GOMP_parallel)
        GOMP_parallel(work_on_tasks, &tasks, threads, 0);
    else
        work_on_tasks(&tasks);
}

#endif
